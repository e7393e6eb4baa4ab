"""Rules on decode context parallelism and how a model's attention is computed: backends, speculation, layers."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, cast

from dcp_operator.flags import Flag
from dcp_operator.rules.context import Context, Problem, RoleContext, Rule
from dcp_operator.rules.edits import Fix
from dcp_operator.rules.values import written


class Backend(NamedTuple):
    """What an attention backend of vLLM can do with decode context parallelism (DCP)."""

    shards: bool = False
    #: Whether it shards with an interleave of 1 only.
    only_single_tokens: bool = False
    #: Whether it takes speculative decoding with an interleave above 1.
    speculates: bool = False


#: vLLM 0.32, `supports_dcp`, `can_return_lse_for_decode` and `supports_mtp_with_cp_non_trivial_interleave_size` of the
#: classes in v1/attention/backends. A backend that is not listed is not known here, and is left to the engine.
BACKENDS: Final[Mapping[str, Backend]] = {
    "FLASH_ATTN": Backend(shards=True),
    "FLASHINFER": Backend(shards=True),
    "FLASH_ATTN_MLA": Backend(shards=True),
    "FLASHMLA": Backend(shards=True),
    "FLASHMLA_SPARSE": Backend(shards=True, speculates=True),
    "CUTLASS_MLA": Backend(shards=True),
    "FLASHINFER_MLA": Backend(shards=True, only_single_tokens=True),
    "FLASHINFER_MLA_SPARSE": Backend(shards=True),
    "TRITON_MLA": Backend(shards=True),
    "TOKENSPEED_MLA": Backend(shards=True, speculates=True),
    "ROCM_AITER_MLA": Backend(shards=True),
    "FLASH_ATTN_MLA_SPARSE": Backend(),
    "TRITON_ATTN": Backend(),
    "FLEX_ATTENTION": Backend(),
    "CPU_ATTN": Backend(),
    "CPU_MLA": Backend(),
    "B12X": Backend(),
    "ROCM_ATTN": Backend(),
    "ROCM_AITER_FA": Backend(),
    "ROCM_AITER_UNIFIED_ATTN": Backend(),
    "ROCM_AITER_MLA_SPARSE": Backend(),
}

_SPECULATIVE = ("--speculative-config", "--spec-method", "--spec-model", "--spec-tokens")


def backend_supports_dcp(context: Context) -> Iterator[Problem]:
    """An attention backend that extraArgs name can shard the KV cache.

    With decodeContext above 1 every rank computes a part of the attention and the parts are merged, which a backend
    must support; the engine ends at start-up otherwise. FLASHINFER_MLA does it with an interleave of 1 only.

    Name another backend, or none: vLLM then chooses one that suits the model and the GPU.
    """
    for role in context.roles:
        stated = _stated_backend(role)
        if stated is None or role.settings.decode_context == 1:
            continue
        flag, name = stated
        known, sizes = BACKENDS.get(name), role.settings
        interleave = f"{role.path}.kvCacheInterleaveSize"
        if known is not None and not known.shards:
            yield Problem(
                role.argument_path(flag.index),
                f"{written(flag)} {name} with {role.path}.parallelism.decodeContext {sizes.decode_context}, and this "
                f"backend does not shard the KV cache; backends that do: {', '.join(_sharding())}",
                fixes=(Fix(f"{role.path}.parallelism.decodeContext", 1),),
            )
        elif known is not None and known.only_single_tokens and sizes.interleave > 1:
            yield Problem(
                role.argument_path(flag.index),
                f"{written(flag)} {name} with {role.path}.parallelism.decodeContext {sizes.decode_context} and "
                f"{interleave} {sizes.interleave}{_default_note(role)}, and this backend takes an interleave of 1 only",
                fixes=(Fix(interleave, 1), Fix(f"{role.path}.parallelism.decodeContext", 1)),
            )


def spec_decode_interleave(context: Context) -> Iterator[Problem]:
    """Speculative decoding with decodeContext above 1 needs an interleave of 1, or a backend that takes more.

    The draft's tokens lie on several ranks then, and only FLASHMLA_SPARSE and TOKENSPEED_MLA compute that rightly for
    an interleave above 1. The engine ends at start-up with any other backend.

    Set kvCacheInterleaveSize to 1, name one of the two backends with --attention-backend, or leave out speculation.
    """
    for role in context.roles:
        sizes, flag = role.settings, _speculation(role)
        if flag is None or sizes.decode_context == 1 or sizes.interleave == 1:
            continue
        stated = _stated_backend(role)
        if stated is not None and BACKENDS.get(stated[1], Backend()).speculates:
            continue
        able = " and ".join(name for name, backend in BACKENDS.items() if backend.speculates)
        interleave = f"{role.path}.kvCacheInterleaveSize"
        yield Problem(
            role.argument_path(flag.index),
            f"{written(flag)} with {role.path}.parallelism.decodeContext {sizes.decode_context} and {interleave} "
            f"{sizes.interleave}{_default_note(role)}, and only the attention backends {able} speculate with an "
            "interleave above 1",
            fixes=(Fix(interleave, 1), Fix(f"{role.path}.parallelism.decodeContext", 1)),
        )


def dcp_full_attention_only(context: Context) -> Iterator[Problem]:
    """decodeContext is 1 for models with layers that don't cache every token.

    Sliding windows, chunks and states of linear layers are not sharded by token, and the engine ends at start-up or
    keeps several kinds of cache of which some are sharded; that is not tested with a transfer.

    Set decodeContext to 1.
    """
    if context.facts is None or context.facts.keeps_every_token:
        return
    for role in context.roles:
        if role.settings.decode_context > 1:
            path = f"{role.path}.parallelism.decodeContext"
            yield Problem(
                path,
                f"{role.settings.decode_context} with {context.model_path('layout')} {context.facts.layout}, and only "
                "models whose layers all cache every token can be sharded",
                fixes=(Fix(path, 1),),
            )


def _sharding() -> list[str]:
    return [name for name, backend in BACKENDS.items() if backend.shards]


def _default_note(role: RoleContext) -> str:
    return f" (from {role.path}.blockSize)" if role.stated.kv_cache_interleave_size is None else ""


def _stated_backend(role: RoleContext) -> tuple[Flag, str] | None:
    """Return the attention backend that extraArgs name, and the flag that does it; None if none is named."""
    flag = role.arguments.last("--attention-backend")
    if flag is not None:
        return flag, flag.value.strip().upper()
    flag = role.arguments.last("--attention-config")
    if flag is None:
        return None
    name = _json_map(flag.value).get("backend")
    return (flag, name.strip().upper()) if isinstance(name, str) else None


def _speculation(role: RoleContext) -> Flag | None:
    """Return the flag that turns speculative decoding on; an empty configuration leaves it off."""
    for name in _SPECULATIVE:
        flag = role.arguments.last(name)
        if flag is not None and not (name == "--speculative-config" and not _json_map(flag.value)):
            return flag
    return None


def _json_map(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


RULES = (
    Rule("backend-supports-dcp", backend_supports_dcp, sources=("vLLM v1/worker/cp_utils.py", "vllm #54803")),
    Rule("spec-decode-interleave", spec_decode_interleave, sources=("vLLM v1/worker/cp_utils.py",)),
    Rule(
        "dcp-full-attention-only",
        dcp_full_attention_only,
        sources=("vLLM v1/core/kv_cache_utils.py",),
        needs_model=True,
    ),
)
