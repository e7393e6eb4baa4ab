"""Rules on what vLLM's attention kernels can read: the rows of a block, and the number formats."""

from collections.abc import Iterator
from typing import Final

from dcp_operator.api.findings import Severity, show
from dcp_operator.flags import AUTO, SUPPORTED, image_version, known_flags
from dcp_operator.rules.context import Context, Problem, RoleContext, Rule
from dcp_operator.rules.edits import REMOVED, Fix
from dcp_operator.rules.values import dtype

#: Resource name's prefix -> rows that a block of every attention backend on such devices is a multiple of.
_ROWS: Final = {"nvidia.com/": 16}
_LARGEST_SUGGESTION: Final = 1024
#: KV-cache formats that are the model's own: vLLM takes them only where they are.
_PLAIN: Final = ("float16", "bfloat16")


def block_size_kernel(context: Context) -> Iterator[Problem]:
    """blockSize is a multiple of what the attention kernels of the devices read at once.

    On NVIDIA GPUs that is 16 tokens with every attention backend that vLLM chooses among, some ask for more (32, 64 or
    128). With another size vLLM finds no backend and the engine ends at start-up.

    Set blockSize to a multiple of 16; 64 suits most models.
    """
    rows = next((rows for prefix, rows in _ROWS.items() if _resource(context).startswith(prefix)), 1)
    for role in context.roles:
        size, path = role.settings.block_size, f"{role.path}.blockSize"
        if size % rows:
            yield Problem(
                path,
                f"{size} is no multiple of {rows}, and no attention backend of vLLM on {_resource(context)} reads such "
                "blocks",
                fixes=tuple(Fix(path, choice) for choice in _block_sizes(role, rows)),
            )


def _resource(context: Context) -> str:
    return context.spec.accelerator.resource_name


def _block_sizes(role: RoleContext, rows: int) -> list[int]:
    """Return multiples around a size that was found, and small ones."""
    near = role.settings.block_size // rows * rows
    return sorted({*range(rows, _LARGEST_SUGGESTION + 1, rows), near or rows, near + rows})


def number_format_known(context: Context) -> Iterator[Problem]:
    """dtype and kvCacheDtype are formats that vLLM knows and that go together.

    The engine ends at start-up with any other dtype, with a kvCacheDtype of 16 bits that differs from dtype, and with
    nvfp4 for a model with latent attention. Since vLLM 0.33 a platform plugin can add KV-cache formats, so there an
    unknown kvCacheDtype is a warning.

    Correct the spelling, or leave the field out: the KV cache takes the format of the model then.
    """
    for role in context.roles:
        yield from _unknown_format(context, role, "dtype", role.settings.dtype)
        yield from _unknown_format(context, role, "kvCacheDtype", role.settings.kv_cache_dtype)
        yield from _formats_apart(context, role)


def _unknown_format(context: Context, role: RoleContext, field: str, found: str | None) -> Iterator[Problem]:
    flag = "--dtype" if field == "dtype" else "--kv-cache-dtype"
    version = image_version(role.stated.image or context.spec.image)
    listed = [*known_flags(version).by_name[flag].choices] if version in SUPPORTED else []
    every = [choice for each in SUPPORTED for choice in known_flags(each).by_name[flag].choices]
    if found is None or found in (listed or every):
        return
    path = f"{role.path}.{field}"
    known = ", ".join(map(str, dict.fromkeys(listed or every)))
    yield Problem(
        path,
        f"{show(found)} is no format that vLLM {known_flags(version).vllm} knows, which are {known}",
        Severity.ERROR if listed else Severity.WARNING,
        fixes=(Fix(path, REMOVED),),
    )


def _formats_apart(context: Context, role: RoleContext) -> Iterator[Problem]:
    """Check the KV cache's format against what else is stated: the computation's, and the model's attention."""
    cached, path = role.settings.kv_cache_dtype, f"{role.path}.kvCacheDtype"
    computed = dtype(role.settings.dtype)
    if cached in _PLAIN and computed not in (AUTO, cached):
        yield Problem(
            path,
            f"{cached} differs from {role.path}.dtype {role.settings.dtype}, and a KV cache of 16 bits has the format "
            "of the computation",
            fixes=(Fix(path, REMOVED), Fix(path, computed), Fix(f"{role.path}.dtype", cached)),
        )
    is_mla = context.geometry is not None and context.geometry.attention == "mla"
    if cached is not None and is_mla and cached.startswith("nvfp4") and not cached.endswith("_ds_mla"):
        yield Problem(
            path,
            f"{cached} with {context.model_path('attention')} mla, whose cache vLLM does not keep in that format",
            fixes=(Fix(path, REMOVED), Fix(path, "fp8")),
        )


RULES = (
    Rule("block-size-kernel", block_size_kernel, sources=("vLLM v1/attention/backends",)),
    Rule("number-format-known", number_format_known, sources=("vLLM config/cache.py", "vLLM config/vllm.py")),
)
