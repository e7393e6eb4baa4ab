"""Decode context parallelism for vLLM's CPU engine: a slow, plain reference for tests, never part of the product.

vLLM calls `register` in every process it starts (entry point group `vllm.general_plugins`). Stock vLLM 0.32 has no
DCP on CPU, and packs the keys of a block for its kernels, so that a token is not a row of bytes. With this plugin

- the cache is plain rows, `[block, kv head, row, K then V]` (`cache`);
- a token goes to the rank, block and row that vLLM's placement formula gives it (`placement`);
- every rank attends over its own rows, and the parts are merged by their log-sum-exp (`attention`);
- `backend` puts these three where vLLM expects an attention backend.
"""

__all__ = ["register"]


def register() -> None:
    """Replace vLLM's CPU attention backend and slot mapping by those of this plugin."""
    # Imported here: the entry point is also loaded by processes that only parse arguments.
    from vllm.utils import cpu_triton_utils
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from dcp_cpu_engine_plugin.placement import compute_slot_mapping

    # CPU_ATTN and not CUSTOM: the CPU platform ignores any other choice and asks for CPU_ATTN's path.
    register_backend(AttentionBackendEnum.CPU_ATTN, "dcp_cpu_engine_plugin.backend.RowBackend")
    # The worker registers the functions of this module as kernels after it has loaded the plugins, so a registration
    # of our own would be overwritten; replacing the function makes the worker register ours.
    cpu_triton_utils._compute_slot_mapping_kernel_impl = compute_slot_mapping
