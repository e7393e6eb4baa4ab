"""Rules between prefill and decode: both sides must mean the same by the same bytes."""

from collections.abc import Callable, Iterator

from dcp_operator.api import sentences
from dcp_operator.api.findings import Severity, show
from dcp_operator.flags import Flag
from dcp_operator.flags.owned import MODEL, SAME_MODEL, SAME_NUMBERS
from dcp_operator.rules.context import Context, Problem, RoleContext, Rule
from dcp_operator.rules.edits import Fix
from dcp_operator.rules.removal import without_flag
from dcp_operator.rules.values import AUTO, BadValueError, dtype, flag_value, kv_cache_dtype, written


def kv_dtype_equal(context: Context) -> Iterator[Problem]:
    """Both roles keep the KV cache in the same data type.

    KV bytes are copied as they are: decode would read prefill's bytes as another number format and answer nonsense.

    State the same kvCacheDtype on both roles, or on neither.
    """
    yield from _equal_formats(context, "kvCacheDtype", "--kv-cache-dtype", kv_cache_dtype)


def dtype_equal(context: Context) -> Iterator[Problem]:
    """Both roles compute in the same data type and quantization.

    The KV cache takes its format from it unless kvCacheDtype says otherwise, and decode continues a computation that
    prefill began.

    State the same dtype on both roles, or on neither; the same for --quantization in extraArgs.
    """
    yield from _equal_formats(context, "dtype", "--dtype", dtype)
    yield from _equal_flags(context, SAME_NUMBERS)


def model_equal(context: Context) -> Iterator[Problem]:
    """Both roles read the same model in the same way.

    spec.model names the model and its revision once, for both roles. Flags that change how it is read (tokenizer, its
    revision, remote code, overrides) have no typed field, so both roles must state them alike: with another tokenizer
    the cached tokens are other tokens.

    Set spec.model, and put the same other flags into the extraArgs of both roles, or into neither.
    """
    for role in context.roles:
        for name in MODEL:
            flag = role.arguments.last(name)
            if flag is not None:
                yield from _named_twice(context, role, flag)
    yield from _equal_flags(context, SAME_MODEL)


def _named_twice(context: Context, role: RoleContext, flag: Flag) -> Iterator[Problem]:
    model = context.spec.model
    scheme, _, reference = model.uri.partition("://")
    if flag.name == "--model":
        field, stated, same = "spec.model.uri", model.uri, reference if scheme == "hf" else None
    else:
        field, stated, same = "spec.model.revision", model.revision, model.revision
    if flag.value != same:
        found = f"is {show(stated)}" if stated else "is not stated"
        yield Problem(
            role.argument_path(flag.index),
            f"{written(flag)} says {show(flag.value)}, but {field} {found}, and it is stated once for "
            f"both roles; remove the argument and set {field}",
            fixes=(without_flag(role, flag),),
        )


def max_model_len(context: Context) -> Iterator[Problem]:
    """decode's maxModelLen is at least prefill's, and neither exceeds the model's.

    Every prompt that prefill takes goes on to decode, which refuses one that is too long, after prefill has done the
    work. If decode's is larger (a warning), prompts that decode could continue are refused by prefill.

    State the same length on both roles.
    """
    prefill, decode = _length(context.prefill), _length(context.decode)
    prefill_path, decode_path = "spec.prefill.maxModelLen", "spec.decode.maxModelLen"
    yield from _beyond_model(context)
    if prefill is None and decode is not None:
        yield Problem(
            prefill_path,
            f"is not stated, so prefill takes the model's own limit, which may be above {decode_path} {decode}; "
            f"state {decode} here too",
            Severity.WARNING,
        )
    if prefill is None or decode is None or prefill == decode:
        return
    if decode < prefill:
        yield Problem(
            decode_path,
            sentences.DECODE_TOO_SHORT.say(decode=decode, prefill=prefill),
            fixes=(Fix(decode_path, prefill), Fix(prefill_path, decode)),
        )
    else:
        yield Problem(
            decode_path,
            f"{decode} is above {prefill_path} {prefill}, so prompts longer than {prefill} tokens are "
            "refused by prefill",
            Severity.WARNING,
        )


def _beyond_model(context: Context) -> Iterator[Problem]:
    limit = context.geometry.max_model_len if context.geometry else None
    # The catalogue has max_position_embeddings, and overrides of the model's configuration can go beyond it.
    is_stated = context.facts is not None and context.facts.is_stated
    for role in context.roles:
        length = _length(role)
        if limit is not None and length is not None and length > limit:
            path = f"{role.path}.maxModelLen"
            yield Problem(
                path,
                f"{length} is above {context.model_path('maxModelLen')} {limit}",
                Severity.ERROR if is_stated else Severity.WARNING,
                (Fix(path, limit),),
            )


def _length(role: RoleContext) -> int | None:
    """Return the longest context of a role in tokens; a flag counts where the field says nothing."""
    if role.settings.max_model_len is not None:
        return role.settings.max_model_len
    flag = role.arguments.last("--max-model-len")
    try:
        value = flag_value(flag) if flag else None
    except BadValueError:
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _equal_formats(
    context: Context, field: str, flag_name: str, normal: Callable[[str | None], str]
) -> Iterator[Problem]:
    """Compare a number format that has a typed field; a flag counts where the field says nothing."""

    def stated(role: RoleContext) -> str | None:
        value = role.settings.kv_cache_dtype if field == "kvCacheDtype" else role.settings.dtype
        flag = role.arguments.last(flag_name)
        return value if value is not None or flag is None else flag.value

    prefill, decode = stated(context.prefill), stated(context.decode)
    if normal(prefill) == normal(decode):
        return
    here, there = f"spec.decode.{field}", f"spec.prefill.{field}"
    yield Problem(
        here,
        f"{decode or AUTO} differs from {there} {prefill or AUTO}, and both must be the same",
        fixes=(Fix(here, prefill or AUTO), Fix(there, decode or AUTO)),
    )


def _equal_flags(context: Context, names: tuple[str, ...]) -> Iterator[Problem]:
    for name in names:
        prefill, decode = context.prefill.arguments.last(name), context.decode.arguments.last(name)
        if _said(prefill) == _said(decode):
            continue
        role, flag = (context.decode, decode) if decode else (context.prefill, prefill)
        path = role.argument_path(flag.index) if flag else f"{role.path}.extraArgs"
        yield Problem(
            path,
            f"{name} is {_shown(decode)} in spec.decode.extraArgs and {_shown(prefill)} in spec.prefill.extraArgs, and "
            "both must be the same; state it alike on both roles, or on neither",
            fixes=(without_flag(role, flag),) if flag else (),
        )


def _said(flag: Flag | None) -> object:
    """Return what counts of a flag when two are compared; a switch that is off says as much as an absent one."""
    if flag is None or (flag.kind == "bool" and flag.negated):
        return None
    return flag.values


def _shown(flag: Flag | None) -> str:
    if flag is None:
        return "absent"
    if flag.kind == "bool":
        return "off" if flag.negated else "on"
    return show(flag.value)


RULES = (
    Rule("kv-dtype-equal", kv_dtype_equal, sources=("vllm PR #29503",)),
    Rule("dtype-equal", dtype_equal, sources=("vllm PR #29503",)),
    Rule("model-equal", model_equal, sources=("llm-d #499",)),
    Rule("max-model-len", max_model_len),
)
