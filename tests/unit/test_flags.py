"""Reading of arguments as vLLM reads them; `tests/contract` holds the same against vLLM's own parser."""

import argparse

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_operator.flags import ProblemKind, known_flags, read_arguments
from dcp_operator.rules.values import BadValueError, flag_value

READ = {
    "separate value": (["--port", "1"], [("--port", ("1",), False)]),
    "value behind =": (["--port=1"], [("--port", ("1",), False)]),
    "empty value behind =": (["--port="], [("--port", ("",), False)]),
    "underscores": (["--tensor_parallel_size=2"], [("--tensor-parallel-size", ("2",), False)]),
    "underscores in the value stay": (["--dtype=a_b"], [("--dtype", ("a_b",), False)]),
    "short form": (["-tp", "2"], [("--tensor-parallel-size", ("2",), False)]),
    "one letter with its value": (["-n8"], [("--nnodes", ("8",), False)]),
    "unique prefix": (["--tensor-par", "2"], [("--tensor-parallel-size", ("2",), False)]),
    "unique prefix of a short form": (["-pc", "2"], [("--prefill-context-parallel-size", ("2",), False)]),
    "negated switch": (["--no-enable-expert-parallel"], [("--enable-expert-parallel", (), True)]),
    "several values": (["--served-model-name", "a", "b"], [("--served-model-name", ("a", "b"), False)]),
    "several values end at the next flag": (
        ["--served-model-name", "a", "--port", "1"],
        [("--served-model-name", ("a",), False), ("--port", ("1",), False)],
    ),
    "negative number": (["--seed", "-1"], [("--seed", ("-1",), False)]),
    "level without space": (["-O3"], [("--optimization-level", ("3",), False)]),
    "level with =": (["-O=3"], [("--optimization-level", ("3",), False)]),
    "level with space": (["-O", "3"], [("--optimization-level", ("3",), False)]),
    "dotted keys become one value": (
        ["--kv-transfer-config.a.b", "1", "--kv-transfer-config.a.c=x"],
        [("--kv-transfer-config", ('{"a": {"b": 1, "c": "x"}}',), False)],
    ),
    "list elements": (
        ["--kv-transfer-config.a+", "1", "--kv-transfer-config.a+=2,3"],
        [("--kv-transfer-config", ('{"a": ["1", "2", "3"]}',), False)],
    ),
    "dotted keys come last": (
        ["--kv-transfer-config.a=1", "--port=1"],
        [("--port", ("1",), False), ("--kv-transfer-config", ('{"a": 1}',), False)],
    ),
    "a dot in a value is no key": (["--model=a.b"], [("--model", ("a.b",), False)]),
}


@pytest.mark.parametrize(("arguments", "expected"), READ.values(), ids=READ.keys())
def test_reads(arguments, expected):
    reading = read_arguments(arguments)
    assert [(flag.name, flag.values, flag.negated) for flag in reading.flags] == expected
    assert reading.problems == ()


UNREADABLE = {
    "a word": (["word"], [(ProblemKind.STRAY, 0)]),
    "two dashes": (["--", "--port"], [(ProblemKind.STRAY, 0), (ProblemKind.NEEDS_VALUE, 1)]),
    "an unknown flag with a value": (["--unheard-of", "1"], [(ProblemKind.UNKNOWN, 0)]),
    "a known flag glued to its value": (["-tp8"], [(ProblemKind.UNKNOWN, 0)]),
    "an ambiguous short form": (["-d", "1"], [(ProblemKind.AMBIGUOUS, 0)]),
    "no value": (["--port"], [(ProblemKind.NEEDS_VALUE, 0)]),
    "a flag where a value should be": (["--port", "--seed", "1"], [(ProblemKind.NEEDS_VALUE, 0)]),
    "a value for a switch": (["--enforce-eager=1"], [(ProblemKind.TAKES_NO_VALUE, 0)]),
    "help": (["-h"], [(ProblemKind.ENDS_ENGINE, 0)]),
    "a dotted key without value": (["--kv-transfer-config.a"], [(ProblemKind.NEEDS_VALUE, 0)]),
    "dotted keys without end": (["--kv-transfer-config" + ".a" * 1000 + "=1"], [(ProblemKind.NEEDS_VALUE, 0)]),
}


@pytest.mark.parametrize(("arguments", "expected"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_reports(arguments, expected):
    assert [(problem.kind, problem.index) for problem in read_arguments(arguments).problems] == expected


VALUES = {
    "a number": (["--tensor-parallel-size=8"], 8),
    "a thousand": (["--max-model-len=8k"], 8000),
    "a binary thousand": (["--max-model-len=8K"], 8192),
    "a fraction of a thousand": (["--max-model-len=25.6k"], 25600),
    "auto": (["--max-model-len=auto"], "auto"),
    "minus one means auto": (["--max-model-len", "-1"], "auto"),
    "a switch": (["--enforce-eager"], True),
    "a switch that is off": (["--no-enforce-eager"], False),
    "a text": (["--dtype=half"], "half"),
}


@pytest.mark.parametrize(("arguments", "expected"), VALUES.values(), ids=VALUES.keys())
def test_values(arguments, expected):
    assert flag_value(read_arguments(arguments).flags[0]) == expected


@pytest.mark.parametrize(
    "arguments", [["-tp=x"], ["-tp=1.5"], ["--max-model-len=2.5K"], ["--max-model-len=k"], ["-tp="]]
)
def test_values_that_vllm_can_not_read(arguments):
    with pytest.raises(BadValueError):
        flag_value(read_arguments(arguments).flags[0])


def test_the_last_use_counts():
    reading = read_arguments(["-tp", "1", "--tensor-parallel-size=2"])
    last = reading.last("--tensor-parallel-size")
    assert last is not None
    assert (last.value, last.index) == ("2", 2)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.text(max_size=40) | st.sampled_from(list(known_flags().by_name)), max_size=12))
def test_never_fails(arguments):
    reading = read_arguments(arguments)
    for entry in (*reading.flags, *reading.problems):
        assert 0 <= entry.index < len(arguments)


class _RefusedError(Exception):
    pass


class _Argparse(argparse.ArgumentParser):
    """The standard library's parser with vLLM's flags: the engine's reading without the engine's own rewriting."""

    def error(self, message):
        raise _RefusedError(message)


def _standard_parser():
    parser = _Argparse(add_help=False)
    for spec in dict.fromkeys(known_flags().by_name.values()):
        if spec.canonical == "--help":
            parser.add_argument(*spec.names, action="store_true")
        elif spec.arity == "0":
            parser.add_argument(*spec.names, dest=spec.canonical, action="append_const", const=())
        else:
            nargs = None if spec.arity == "1" else spec.arity
            parser.add_argument(*spec.names, dest=spec.canonical, action="append", nargs=nargs)
    return parser


_STANDARD = _standard_parser()
_WORDS = st.sampled_from(["1", "x", "-1", "a b", ""])
_SPELLINGS = st.sampled_from([name for name in known_flags().by_name if "help" not in name and name != "-h"])


@st.composite
def _arguments(draw):
    result = []
    for _ in range(draw(st.integers(1, 4))):
        name = draw(_SPELLINGS)
        if name.startswith("--"):
            name = name[: draw(st.integers(4, len(name)))]
        if draw(st.booleans()):
            result.append(f"{name}={draw(_WORDS)}")
        else:
            result += [name, *draw(st.lists(_WORDS, max_size=2))]
    return result


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_arguments())
def test_agrees_with_the_standard_library(arguments):
    """What argparse takes is read alike, and what it refuses has a problem."""
    reading = read_arguments(arguments)
    try:
        values = vars(_STANDARD.parse_args(arguments))
    except _RefusedError:
        assert reading.problems
        return
    assert reading.problems == ()
    expected = {name: uses for name, uses in values.items() if uses}
    found = {}
    for flag in reading.flags:
        arity = known_flags().by_name[flag.name].arity
        use = () if arity == "0" else list(flag.values) if arity in "+*" else flag.values[0] if flag.values else None
        found.setdefault(flag.name, []).append(use)
    assert found == expected
