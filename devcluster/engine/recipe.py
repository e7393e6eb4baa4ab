"""What an engine environment is made of, as a key, and what a failed installation means, as a sentence. Pure."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

__all__ = [
    "ENGINE_FOLDER",
    "INSPECT_MODEL",
    "MODELS",
    "NEEDED_BYTES",
    "PLUGIN_FOLDER",
    "STARTUP_PTH",
    "content_key",
    "environment_key",
    "explain_failure",
]

ENGINE_FOLDER = Path(__file__).resolve().parent
PLUGIN_FOLDER = ENGINE_FOLDER.parent.parent / "tests" / "engine_plugin"

#: Models by name: number of KV heads. One head is what DCP needs at TP 2, two heads at TP 4.
MODELS = {"tiny-mqa": 1, "tiny-gqa": 2}

#: Free disk that an installation asks for: 5.4 GB of packages, 0.5 GB of bytecode, and what is unpacked on the way.
NEEDED_BYTES = 8 * 10**9

#: A line that every interpreter of the environment runs first. A quarter of an import of vLLM is spent by the garbage
#: collector on objects that stay for ever, and three processes in a row import it when an engine starts.
STARTUP_PTH = "import gc; gc.set_threshold(50_000, 20, 50)\n"

#: vLLM inspects a model class in a process of its own, which takes 7 s, and keeps the answer in its cache folder. A pod
#: starts with an empty one, so the answer becomes part of the environment.
INSPECT_MODEL = (
    "from vllm.model_executor.models.registry import ModelRegistry\n"
    "ModelRegistry.models['LlamaForCausalLM'].inspect_model_cls()\n"
)

_UNREACHABLE = re.compile(
    r"error sending request|dns error|failed to fetch|connection (refused|reset)|status (client|server) error"
    r"|operation timed out|tls|certificate",
    re.IGNORECASE,
)


def environment_key(python: Path, python_version: str) -> str:
    """Return the name of the environment: it changes with all that decides what is in it."""
    files = [ENGINE_FOLDER / name for name in ("uv.lock", "pyproject.toml")]
    files += [PLUGIN_FOLDER / "pyproject.toml", *sorted((PLUGIN_FOLDER / "src").rglob("*.py"))]
    checkout = ENGINE_FOLDER.parent.parent
    contents = {str(file.relative_to(checkout)): file.read_bytes() for file in files}
    return content_key(contents, STARTUP_PTH, INSPECT_MODEL, str(python), python_version)


def content_key(contents: Mapping[str, bytes], *words: str) -> str:
    """Return 16 hexadecimal digits that change with any name, any content and any of the words."""
    digest = hashlib.sha256()
    for part in (*words, *(item for name in sorted(contents) for item in (name, contents[name]))):
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)  # the length keeps neighbours apart
    return digest.hexdigest()[:16]


def explain_failure(output: str, log_file: Path) -> str:
    """Return one sentence for the output of an installation that failed."""
    if "No space left on device" in output:
        return f"the disk became full while the CPU engine was being installed: it needs {NEEDED_BYTES // 10**9} GB"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if refused := [line for line in lines if _UNREACHABLE.search(line)]:
        return f"the package index refused the CPU engine's packages: {refused[0][:300]} (all of it: {log_file})"
    said = " / ".join(lines[-3:])[-600:] or "it said nothing"
    return f"the CPU engine could not be installed: {said} (all of it: {log_file})"
