"""Reading of arguments as vLLM reads them; `tests/contract` holds the same against vLLM's own parser."""

import argparse
import contextlib
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_operator.flags import (
    SUPPORTED,
    BadValueError,
    ProblemKind,
    flag_value,
    image_version,
    known_flags,
    read_arguments,
    versions_with,
)

READ = {
    "separate value": (["--port", "1"], [("--port", ("1",), False)]),
    "value behind =": (["--port=1"], [("--port", ("1",), False)]),
    "empty value behind =": (["--port="], [("--port", ("",), False)]),
    "underscores": (["--tensor_parallel_size=2"], [("--tensor-parallel-size", ("2",), False)]),
    "underscores in the value stay": (["--dtype=a_b"], [("--dtype", ("a_b",), False)]),
    "short form": (["-tp", "2"], [("--tensor-parallel-size", ("2",), False)]),
    "one letter with its value": (["-n8"], [("--nnodes", ("8",), False)]),
    "unique prefix": (["--tensor-par", "2"], [("--tensor-parallel-size", ("2",), False)]),
    "switched off by its opposite": (["--disable-expert-parallel"], [("--enable-expert-parallel", (), True)]),
    "switched on by its opposite": (["--enable-uvicorn-access-log"], [("--disable-uvicorn-access-log", (), True)]),
    "a size behind a dotted key": (
        ["--kv-transfer-config.a=80k"],
        [("--kv-transfer-config", ('{"a": 80000}',), False)],
    ),
    "prefix of a short form with its value": (["-pc=2"], [("--prefill-context-parallel-size", ("2",), False)]),
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
    "a dotted key with a number that is too long": (
        ["--kv-transfer-config.a=" + "9" * 5000],
        [(ProblemKind.NEEDS_VALUE, 0)],
    ),
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
    "a fraction that is cut off": (["--max-model-len=1.001k"], 1000),
    "auto": (["--max-model-len=auto"], "auto"),
    "minus one means auto": (["--max-model-len", "-1"], "auto"),
    "a switch": (["--enforce-eager"], True),
    "a switch that is off": (["--no-enforce-eager"], False),
    "a text": (["--dtype=half"], "half"),
    "a fraction": (["--gpu-memory-utilization=.5"], 0.5),
    "nothing, where nothing is a value": (["--quantization", "None"], "None"),
    "a choice in another spelling": (["--moe-backend=Deep-Gemm"], "deep_gemm"),
    "JSON stays a text": (["--hf-overrides", '{"a": 1}'], '{"a": 1}'),
    "a path where JSON may stand": (["--hf-overrides", "some.function"], "some.function"),
    "sizes inside of JSON": (["--kv-transfer-config", '{"kv_buffer_size": 80m}'], '{"kv_buffer_size": 80m}'),
}


@pytest.mark.parametrize(("arguments", "expected"), VALUES.values(), ids=VALUES.keys())
def test_values(arguments, expected):
    assert flag_value(read_arguments(arguments).flags[0]) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ["-tp=x"],
        ["-tp=1.5"],
        ["-tp="],
        ["-tp=" + "9" * 5000],
        ["--max-model-len=2.5K"],
        ["--max-model-len=k"],
        ["--max-model-len=" + "9" * 400 + ".0k"],
        ["--gpu-memory-utilization=half"],
        ["--dtype=bfloat17"],
        ["--moe-backend=none-such"],
        ["--hf-overrides={nothing}"],
        ["--kv-transfer-config=kv_both"],
        ["--kv-transfer-config=[1]"],
        ["--kv-transfer-config", '{"a": ' + "[" * 100_000],
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
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


IMAGES = {
    "vllm/vllm-openai:v0.33.0": "0.33",
    "registry.example:5000/mirror/vllm-openai:v0.32.1-cu129@sha256:0123": "0.32",
    "vllm/vllm-openai:0.33": "0.33",
    "vllm/vllm-openai:v0.330": "0.330",
    "vllm/vllm-openai:latest": None,
    "vllm/vllm-openai": None,
    "vllm/vllm-openai@sha256:0123": None,
    "vllm/our-engine:v0.33.0": None,
}


@pytest.mark.parametrize(("image", "version"), IMAGES.items())
def test_an_image_tells_its_version_where_its_own_name_does(image, version):
    assert image_version(image) == version


def test_a_version_knows_its_own_flags_only():
    assert versions_with("--disable-expert-parallel") == ("0.33",)
    [problem] = read_arguments(["--disable-expert-parallel"], known_flags("0.32")).problems
    assert problem.kind is ProblemKind.UNKNOWN
    assert read_arguments(["--disable-expert-parallel"], known_flags("0.33")).problems == ()


def test_without_a_version_everything_that_one_knows_is_known():
    every = {name for version in SUPPORTED for name in known_flags(version).by_name}
    assert set(known_flags().by_name) == every
    assert known_flags("9.9") == known_flags()


def test_only_the_first_unknown_flags_are_compared_with_known_ones():
    problems = read_arguments([f"--enforce-eagre{number}" for number in range(256)]).problems
    assert [bool(problem.candidates) for problem in problems] == [True] * 4 + [False] * 252


MILLION = 1_000_000
LARGEST = {
    "one word": ["x" * MILLION],
    "one flag": ["--" + "x" * MILLION],
    "underscores": ["--" + "_" * MILLION],
    "dots": ["--a" + "." * MILLION + "=1"],
    "many dotted keys": [f"--hf-overrides.k{number}=1" for number in range(MILLION // 20)],
    "one list of many": ["--hf-overrides.a+=" + "," * MILLION],
    "many short lists": ["--hf-overrides.a+=1"] * (MILLION // 20),
    "digits": ["-tp=" + "9" * MILLION],
    "a size": ["--max-model-len=" + "9" * MILLION + "k"],
    "a negative number": ["-" + "1" * MILLION + "x"],
    "brackets": ["--kv-transfer-config=" + "[" * MILLION],
    "escaped quotes": ['--kv-transfer-config="' + '\\"' * (MILLION // 2) + "\\\n"],
    "quotes": ["--kv-transfer-config=" + '"' * MILLION],
    "braces": ["--hf-overrides={" + "} " * (MILLION // 2) + "x"],
    "sizes in JSON": ["--kv-transfer-config={" + "1k " * (MILLION // 3) + "}"],
    "many unknown flags": [f"--unheard-of-{number:034}" for number in range(MILLION // 50)],
    "many values": ["--served-model-name", *["x" * 50] * (MILLION // 50)],
    "many words": ["x" * 50] * (MILLION // 50),
    "many dashes": ["-"] * (MILLION // 50),
    "many short flags": ["-tp=1"] * (MILLION // 5),
}


@pytest.mark.parametrize("arguments", LARGEST.values(), ids=LARGEST.keys())
def test_a_million_characters_are_read_in_bounded_time(arguments):
    # The fastest takes milliseconds and the slowest some seconds on a busy machine; anything that grows with the square
    # of the length would take hours.
    begin = time.perf_counter()
    reading = read_arguments(arguments)
    for flag in reading.flags[:1000]:
        with contextlib.suppress(BadValueError):
            flag_value(flag)
    assert time.perf_counter() - begin < 60
    assert reading.flags or reading.problems


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
