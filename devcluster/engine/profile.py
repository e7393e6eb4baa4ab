"""How a CPU engine is started, in one place: for tests, for developers, and for the pods of the demo.

Each setting says why it is there; the seconds were measured on two cores with a TP 1 engine. The largest step is not
here: bytecode in the environment (62 s without it, 23 s with it).
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

__all__ = ["API_SERVER", "ARGUMENTS", "ENVIRONMENT", "arguments", "cache_root", "environment"]

#: The module of vLLM's HTTP server.
API_SERVER = "vllm.entrypoints.openai.api_server"

#: The same for every CPU engine. `VLLM_CACHE_ROOT` comes on top and depends on where the environment is (`cache_root`).
ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        # One thread per rank and no binding to cores: the ranks of all engines share two cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Nothing is fetched and nothing is reported.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Without it the first request compiles C++, and needs a compiler in the pod.
        "TORCHDYNAMO_DISABLE": "1",
    }
)

#: Arguments that every CPU engine has, whatever its layout.
ARGUMENTS: tuple[str, ...] = (
    "--enforce-eager",
    # Tokens are compared between different numbers of ranks: float32 keeps rounding far below any tie.
    "--dtype=float32",
    "--block-size=32",
    # 131,072 tokens of the tiny model. An explicit size also spares the warm-up; the default would touch 1 GB or more.
    "--kv-cache-memory-bytes=134217728",
    "--max-model-len=2048",
    "--max-num-seqs=16",
    # Prompts of more than 256 tokens take several steps: chunked prefill is exercised.
    "--max-num-batched-tokens=256",
    "--distributed-executor-backend=mp",
    "--disable-uvicorn-access-log",
)


def cache_root(environment_path: Path | str) -> str:
    """Return VLLM_CACHE_ROOT for an environment seen at this path: it holds what vLLM found out about the models."""
    return f"{environment_path}/vllm-cache"


def environment(environment_path: Path | str) -> dict[str, str]:
    """Return the variables of an engine whose environment is seen at this path."""
    return {**ENVIRONMENT, "VLLM_CACHE_ROOT": cache_root(environment_path)}


def arguments(
    model: Path | str,
    *,
    served_model_name: str,
    host: str,
    port: int,
    tensor: int = 1,
    dcp: int = 1,
    interleave: int = 1,
) -> list[str]:
    """Return the arguments of the API server for one layout. `interleave` is in tokens and says nothing at DCP 1."""
    layout = [f"--tensor-parallel-size={tensor}"]
    if dcp > 1:
        layout += [f"--decode-context-parallel-size={dcp}", f"--cp-kv-cache-interleave-size={interleave}"]
    named = [f"--model={model}", f"--served-model-name={served_model_name}", f"--host={host}", f"--port={port}"]
    return [*named, *layout, *ARGUMENTS]
