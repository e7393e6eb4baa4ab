"""Command lines for vLLM as hypothesis strategies: right ones in every spelling, and wrong ones."""

import json

from hypothesis import strategies as st

from dcp_operator.flags import FlagSpec, known_flags

#: Texts that mean something to one converter or another, or nothing to any.
_ODD = ("", "None", "none", "auto", "-1", "1.5", ".5", "1e3", "0x10", "1_000", " 7 ", "٣", "inf", "nan", "8k", "8K")
_ODD += ("25.6k", "1.001k", "2.5K", "k", "x", "a b", "a.b", "-x", "{}", "{1}", "[1]", '"a"', "{'a': 1}", "a=b")
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "80k", "x.y"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b.c", "kv_role"]), inner),
    max_leaves=4,
)
_KEYS = st.sampled_from(["a", "a.b", "a.c", "b_c", "a+", "kv_role", "", "1"])
#: Reads a file, so that vLLM's answer depends on more than the arguments; the rules refuse it.
_LEFT_OUT = frozenset({"--config"})

_SPECS = tuple(dict.fromkeys(spec for spec in known_flags().by_name.values() if not _LEFT_OUT & {*spec.names}))


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """Arguments of one to five uses of flags, with words among them now and then."""
    line: list[str] = []
    for _ in range(draw(st.integers(1, 5))):
        words = st.sampled_from((*_ODD, "--")).map(lambda word: [word])
        line += draw(_uses() | _uses() | _uses() | _uses() | _dotted() | words)
    return line


@st.composite
def _uses(draw: st.DrawFn) -> list[str]:
    spec = draw(st.sampled_from(_SPECS))
    name = _spelled(draw, draw(st.sampled_from(spec.names)))
    if spec.arity == "0":
        return [name] if draw(st.integers(0, 9)) else [f"{name}={draw(_values(spec))}"]
    values = draw(st.lists(_values(spec), min_size=1, max_size=3 if spec.arity in "+*" else 1))
    if not draw(st.integers(0, 9)):
        values = []
    if values and draw(st.booleans()):
        return [f"{name}={values[0]}", *values[1:]]
    if values and not name.startswith("--") and not draw(st.integers(0, 3)):
        return [name + values[0], *values[1:]]
    return [name, *values]


@st.composite
def _dotted(draw: st.DrawFn) -> list[str]:
    spec = draw(st.sampled_from([spec for spec in _SPECS if spec.kind in ("json", "config", "json-or-text", "int")]))
    name = f"{_spelled(draw, spec.names[0])}.{draw(_KEYS)}"
    value = draw(st.sampled_from(_ODD) | _JSON.map(json.dumps))
    return [f"{name}={value}"] if draw(st.booleans()) else [name, value]


def _spelled(draw: st.DrawFn, name: str) -> str:
    """Return a spelling with underscores, shortened, or with a letter too many."""
    if name.startswith("--"):
        match draw(st.integers(0, 9)):
            case 0:
                return "--" + name[2:].replace("-", "_")
            case 1 | 2:
                return name[: draw(st.integers(3, len(name)))]
            case 3:
                return name + draw(st.sampled_from(["x", "-", " ", "s"]))
            case _:
                return name
    return name if draw(st.integers(0, 5)) else name[: draw(st.integers(2, len(name)))]


def _values(spec: FlagSpec) -> st.SearchStrategy[str]:
    right = {
        "int": st.integers(-2, 5000).map(str),
        "float": st.floats(allow_nan=False).map(str),
        "size": st.sampled_from(["1k", "8K", "3", "1.5m"]),
        "size-or-auto": st.sampled_from(["auto", "AUTO", "-1", "32k", "1.001k", "4096"]),
        "json": _JSON.map(json.dumps),
        "config": st.dictionaries(st.sampled_from(["kv_role", "a"]), st.just("kv_both")).map(json.dumps),
        "json-or-text": st.sampled_from(["{}", '{"a": 1}', "some.function", " {} "]),
    }.get(spec.kind, st.sampled_from(["x", "a-b", "A_B", "a=b", "ü"]))
    if spec.choices:
        right = st.sampled_from([str(choice) for choice in spec.choices])
    return right | right | right | st.sampled_from(_ODD)
