"""The Python source of a published vLLM release that this machine's engines don't run, for contract tests.

The engine environment holds vLLM 0.32 for CPU. What 0.33 promises is read from its published wheel: fetched once, by
its hash and without its dependencies, and kept in the cache without its binaries. Put the folder in front of the
engine environment's own packages (`PYTHONPATH`) to import modules that need no compiled code, or read it as text.
"""

import shutil
import sys
from pathlib import Path

from devcluster.errors import DevClusterError
from devcluster.files import ensure_folder
from devcluster.paths import this_cache
from devcluster.progress import Log
from devcluster.shell import find_program, run

#: Supported release -> SHA-256 of its wheel for Linux on x86-64 (0.34 GB).
WHEELS = {"0.33.0": "4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa"}


def vllm_source(version: str = "0.33.0", log: Log = print) -> Path:
    """Return the folder that holds the package `vllm` of a release, as Python files only (60 MB), fetched if missing.

    Raises:
        DevClusterError: one sentence, when the package index refuses it or its hash differs.
    """
    digest = WHEELS[version]
    cache = this_cache().root
    target = cache / "vllm" / f"{version}-{digest[:12]}"
    ensure_folder(
        target,
        lambda partial: _fetch(partial, version, digest, cache),
        log,
        f"the Python source of vLLM {version}",
        cache / "locks" / "vllm.lock",
    )
    return target


def _fetch(partial: Path, version: str, digest: str, cache: Path) -> None:
    wanted = partial / "requirements.txt"
    wanted.write_text(f"vllm=={version} --hash=sha256:{digest}\n")
    installed = partial / "installed"
    # Without uv's own cache: 1.3 GB would stay there for 60 MB that are wanted.
    run(
        [
            *(_uv(cache), "pip", "install", "--quiet", "--no-cache", "--no-deps", "--require-hashes"),
            *("--only-binary", ":all:", "--python", sys.executable, "--python-platform", "x86_64-manylinux_2_28"),
            *("--target", installed, "--requirements", wanted),
        ],
        what=f"fetching vLLM {version}",
        timeout_s=900,
    )
    wanted.unlink()
    for path in sorted((installed / "vllm").rglob("*.py")):
        kept = partial / path.relative_to(installed)
        kept.parent.mkdir(parents=True, exist_ok=True)
        path.rename(kept)
    shutil.rmtree(installed)


def _uv(cache: Path) -> Path:
    found = find_program("uv")
    candidates = [Path(found)] if found else []
    candidates += sorted((cache / "tools").glob("uv-*/bin/uv"), reverse=True)
    if not candidates:
        raise DevClusterError("uv is neither on PATH nor in the cache; `make venv` brings it")
    return candidates[0]
