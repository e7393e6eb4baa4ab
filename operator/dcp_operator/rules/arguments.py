"""Rules on extraArgs: what vLLM could not read, and what the operator or a typed field has already said."""

from collections.abc import Iterator

from dcp_operator.api.findings import Severity, show
from dcp_operator.flags import Flag, ProblemKind, versions_with
from dcp_operator.flags import Problem as ArgumentProblem
from dcp_operator.flags.owned import DEPRECATED_INTERLEAVE, OWNED, TYPED
from dcp_operator.rules.context import Context, Problem, RoleContext, Rule
from dcp_operator.rules.removal import without_flag, without_item
from dcp_operator.rules.values import BadValueError, flag_value, same_value, written

_LISTED_CANDIDATES = 6


def extra_args_malformed(context: Context) -> Iterator[Problem]:
    """Every item of extraArgs can be read as vLLM reads it.

    vLLM ends at start-up with an argument that it can't read: a word that is neither a flag nor a flag's value, a flag
    without its value, an abbreviation of several flags. A frequent cause is a flag and its value in one item.

    Write one argument per item: `--max-num-seqs=64`, or `--max-num-seqs` and `64`.
    """
    for role in context.roles:
        for problem in role.arguments.problems:
            if problem.kind is not ProblemKind.UNKNOWN:
                path = role.argument_path(problem.index)
                yield Problem(path, _unreadable(problem), fixes=(without_item(role, problem.index),))
        for flag in role.arguments.flags:
            if flag.name not in OWNED:
                try:
                    flag_value(flag)
                except BadValueError as error:
                    yield Problem(
                        role.argument_path(flag.index),
                        f"{written(flag)} has the value {show(flag.value)}, {error}",
                        fixes=(without_flag(role, flag),),
                    )


def extra_args_unknown(context: Context) -> Iterator[Problem]:
    """vLLM knows every flag of extraArgs (a warning).

    The flag is not among those of the vLLM version that the image's tag names, or of any supported one where it names
    none. The engine ends at start-up, unless the image brings a flag of its own; so this is a warning.

    Correct the spelling; the message names the flag that looks most like it.
    """
    for role in context.roles:
        for problem in role.arguments.problems:
            if problem.kind is ProblemKind.UNKNOWN:
                yield Problem(
                    role.argument_path(problem.index),
                    f"{show(problem.text)} is no flag of vLLM {role.arguments.vllm}{_hint(problem)}",
                    Severity.WARNING,
                )


def _hint(problem: ArgumentProblem) -> str:
    """Return what is known of an unknown flag: the versions that have it, or the flag that looks most like it."""
    others = versions_with(problem.text.partition("=")[0].replace("_", "-"))
    if others:
        return f", but of {' and '.join(others)}"
    return f"; did you mean {problem.candidates[0]}?" if problem.candidates else ""


def connector_args(context: Context) -> Iterator[Problem]:
    """What the operator owns is not set in extraArgs: KV transfer, ports, addresses, the placement of ranks.

    Both roles, the router and the probes rely on these values. vLLM takes the last use of a flag, and extraArgs come
    last, so a flag there would silently win.

    Remove the flag. spec.kvConnector is where the transfer is set.
    """
    for role in context.roles:
        for flag in role.arguments.flags:
            if reason := OWNED.get(flag.name):
                yield Problem(
                    role.argument_path(flag.index),
                    f"{written(flag)} belongs to the operator, because {reason}; remove it",
                    fixes=(without_flag(role, flag),),
                )


def interleave_deprecated_flag(context: Context) -> Iterator[Problem]:
    """--dcp-kv-cache-interleave-size is not used.

    The deprecated flag takes effect only while KV transfer is on, and then overrides
    --cp-kv-cache-interleave-size: the same arguments mean different things in two engines.

    Set kvCacheInterleaveSize instead.
    """
    for role in context.roles:
        for flag in role.arguments.flags:
            if flag.name == DEPRECATED_INTERLEAVE:
                yield Problem(
                    role.argument_path(flag.index),
                    f"{written(flag)} {flag.value} is deprecated and means different things with and without KV "
                    f"transfer; remove it and set {role.path}.kvCacheInterleaveSize",
                    fixes=(without_flag(role, flag),),
                )


def extra_args_contradict(context: Context) -> Iterator[Problem]:
    """extraArgs say nothing else than the typed fields.

    vLLM takes the last use of a flag, and extraArgs come last: the engine would run with the flag's value while the
    operator, the other role and the rules reckon with the field's. A flag that repeats the field's value is taken.

    Remove the flag and set the field.
    """
    for role in context.roles:
        for name, field in TYPED.items():
            flag = role.arguments.last(name)
            if flag is not None:
                yield from _contradiction(context, role, flag, field)
        yield from _served_name(context, role)


def _contradiction(context: Context, role: RoleContext, flag: Flag, field: str) -> Iterator[Problem]:
    try:
        said = flag_value(flag)
    except BadValueError:
        return
    stated = _field_value(role, field)
    if stated is None or same_value(flag.name, said, stated):
        return
    origin = _origin(context, role, field)
    yield Problem(
        role.argument_path(flag.index),
        f"{written(flag, full=True)} says {show(said)}, but {role.path}.{field} is {show(stated)}{origin}; remove the "
        f"argument, or set the field to {show(said)}",
        fixes=(without_flag(role, flag),),
    )


def _field_value(role: RoleContext, field: str) -> int | bool | str | None:
    """Return what the engine is told for a field, after defaults; None where the operator says nothing."""
    sizes = role.settings
    values: dict[str, int | bool | str | None] = {
        "parallelism.tensor": sizes.tensor,
        "parallelism.pipeline": sizes.pipeline,
        "parallelism.data": sizes.data,
        "parallelism.dataLocal": sizes.data_local,
        "parallelism.expert": sizes.expert,
        "parallelism.decodeContext": sizes.decode_context,
        "parallelism.prefillContext": sizes.prefill_context,
        "blockSize": sizes.block_size,
        "kvCacheInterleaveSize": sizes.interleave,
        "dtype": sizes.dtype,
        "kvCacheDtype": sizes.kv_cache_dtype,
        "maxModelLen": sizes.max_model_len,
    }
    return values[field]


def _origin(context: Context, role: RoleContext, field: str) -> str:
    """Return where a value comes from that the user has not stated."""
    if field == "kvCacheInterleaveSize" and role.stated.kv_cache_interleave_size is None:
        return f" (from {role.path}.blockSize)"
    if field == "maxModelLen" and role.stated.max_model_len is None and context.geometry:
        return " (from spec.model.geometry.maxModelLen)"
    if field == "parallelism.dataLocal" and role.stated.parallelism.data_local is None:
        return f" (from {role.path}.parallelism.data)"
    return ""


def _served_name(context: Context, role: RoleContext) -> Iterator[Problem]:
    flag = role.arguments.last("--served-model-name")
    wanted = context.spec.model.served_name or context.obj.metadata.name
    if flag is not None and list(flag.values) != [wanted]:
        hint = f", or set the field to {show(flag.value)}" if len(flag.values) == 1 else ""
        yield Problem(
            role.argument_path(flag.index),
            f"{written(flag)} says {show(flag.value)}, but spec.model.servedName is {show(wanted)}; remove the argument"
            f"{hint}",
            fixes=(without_flag(role, flag),),
        )


def _unreadable(problem: ArgumentProblem) -> str:
    text = show(problem.text)
    match problem.kind:
        case ProblemKind.STRAY if problem.text.startswith("-") and " " in problem.text:
            flag, value = problem.text.split(" ", 1)
            return f"{text} is one item; vLLM needs the flag and its value apart: {show(flag)}, {show(value)}"
        case ProblemKind.AMBIGUOUS:
            listed = ", ".join(problem.candidates[:_LISTED_CANDIDATES])
            more = len(problem.candidates) - _LISTED_CANDIDATES
            return f"{text} abbreviates several flags: {listed}{f' and {more} more' if more > 0 else ''}; write one out"
        case ProblemKind.NEEDS_VALUE:
            return f"{text} needs a value; write it behind =, or as the next item"
        case ProblemKind.TAKES_NO_VALUE:
            return f"{text} has a value, but the flag takes none; remove everything from = on"
        case ProblemKind.ENDS_ENGINE:
            return f"{text} prints a text and ends the engine; remove it"
        case _:
            return f"{text} is neither a flag nor the value of one; remove it"


RULES = (
    Rule("extra-args-malformed", extra_args_malformed),
    Rule("extra-args-unknown", extra_args_unknown),
    Rule("connector-args", connector_args, sources=("kthena #1453", "kserve #5987")),
    Rule("interleave-deprecated-flag", interleave_deprecated_flag, sources=("vLLM config/vllm.py",)),
    Rule("extra-args-contradict", extra_args_contradict, sources=("the golden files of kthena, with TP 16 beside 2",)),
)
