"""Decode context parallelism for vLLM's CPU engine: a slow, plain reference for tests, never part of the product.

vLLM calls `register` in every process it starts (entry point group `vllm.general_plugins`). Stock vLLM 0.32 has no
DCP on CPU, and packs the keys of a block for its kernels, so that a token is not a row of bytes. With this plugin

- the cache is plain rows, `[block, kv head, row, K then V]` (`cache`);
- a token goes to the rank, block and row that vLLM's placement formula gives it (`placement`);
- every rank attends over its own rows, and the parts are merged by their log-sum-exp (`attention`);
- `backend` puts these three where vLLM expects an attention backend.

It also lets waiting processes sleep where vLLM spins with sched_yield: a handful of engines share two cores here, and
with Linux 6.18 other threads of a process that yields all the time were seen to get no turn for 20 seconds.
"""

import time

__all__ = ["register"]

#: Pause of a process that waits for another one's message: far below a step's time, and no load.
_PAUSE_S = 0.0005


def _pause() -> None:
    time.sleep(_PAUSE_S)


def register() -> None:
    """Replace vLLM's CPU attention backend, slot mapping and way of waiting by those of this plugin."""
    # Imported here: the entry point is also loaded by processes that only parse arguments.
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.utils import cpu_triton_utils
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from dcp_cpu_engine_plugin.placement import compute_slot_mapping

    # CPU_ATTN and not CUSTOM: the CPU platform ignores any other choice and asks for CPU_ATTN's path.
    register_backend(AttentionBackendEnum.CPU_ATTN, "dcp_cpu_engine_plugin.backend.RowBackend")
    # The worker registers the functions of this module as kernels after it has loaded the plugins, so a registration
    # of our own would be overwritten; replacing the function makes the worker register ours.
    cpu_triton_utils._compute_slot_mapping_kernel_impl = compute_slot_mapping
    shm_broadcast.sched_yield = _pause
