"""`dcpctl kv-plan` as a person runs it: golden output, and one sentence for everything that is wrong."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dcp_operator.cli import main

DCPCTL = Path(sys.executable).with_name("dcpctl")
GOLDEN = Path(__file__).with_name("golden")
ISSUE = "--prefill tp=4,block=16 --decode tp=8,dcp=8,interleave=1,block=16 --kv-heads 1 --tokens 4096"
CASES = {
    "kv-plan-interleave-1": ISSUE,
    "kv-plan-gqa-tcp": "--prefill tp=8,dcp=2,interleave=1,block=16 --decode tp=2,block=32 --kv-heads 4 --tokens 1000 "
    "--transport tcp --layers 28",
    "kv-plan-whole-blocks": "--prefill tp=4 --decode tp=8,dcp=8 --kv-heads 1 --tokens 600 --entry-bytes 1152",
}


def process(arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it as a user does."""
    return subprocess.run(
        [DCPCTL, "kv-plan", *arguments.split()], capture_output=True, text=True, check=False, timeout=120
    )


def run(arguments: str | list[str]) -> subprocess.CompletedProcess[str]:
    """Run it in this process, which is much faster."""
    words = arguments.split() if isinstance(arguments, str) else arguments
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(["kv-plan", *words])
        except SystemExit as end:  # argparse's own refusals and --help
            code = int(end.code or 0)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


@pytest.mark.parametrize("case", CASES)
def test_the_plan_reads_as_it_should(case: str) -> None:
    result = process(CASES[case])
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (GOLDEN / f"{case}.txt").read_text()


def test_the_plan_as_json() -> None:
    result = run(f"{ISSUE} -o json")
    assert (result.returncode, result.stdout.count("\n")) == (0, 1)
    plan = json.loads(result.stdout)
    deliveries = plan.pop("deliveries")
    hints = plan.pop("faster")
    assert plan == {
        "prefill": {"tp": 4, "dcp": 1, "interleave": 16, "block": 16},
        "decode": {"tp": 8, "dcp": 8, "interleave": 1, "block": 16},
        "kvHeads": 1,
        "tokens": 4096,
        "layers": 1,
        "entryBytes": 512,
        "transport": "rdma",
        "bytes": 4096 * 512,
        "fragments": 256,
        "meanFragmentBytes": 8192.0,
        "pairsByPath": {"pack": 8},
        "idlePrefillRanks": [],
    }
    assert [(each["prefillRank"], each["decodeRank"]) for each in deliveries] == [(d % 4, d) for d in range(8)]
    assert deliveries[3] == {
        "prefillRank": 3,
        "decodeRank": 3,
        "kvHeads": [0],
        "tokens": 512,
        "numTokenRanges": 512,
        "tokenRanges": [[token, token] for token in range(3, 64, 8)],
        "path": "pack",
        "bytes": 512 * 512,
        "fragments": 32,
        "meanFragmentBytes": 8192.0,
    }
    assert hints[0]["changes"] == {"decode": {"interleave": 16}}
    assert hints[0]["pairsByPath"] == {"direct": 8}
    assert hints[0]["words"].startswith("decode interleave=16: nothing is copied on the hosts.")


def changed(**options: str) -> list[str]:
    """The issue's command with some options changed."""
    words = ISSUE.split()
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if option in words:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]
    return words


WRONG = {
    "no equals sign": ({"prefill": "tp4"}, "--prefill: found 'tp4' where SETTING=NUMBER is expected, as in tp=4,block"),
    "nothing": ({"prefill": ""}, "--prefill: found '' where SETTING=NUMBER is expected"),
    "a comma at the end": ({"decode": "tp=8,"}, "--decode: found '' where SETTING=NUMBER is expected"),
    "spaces": ({"decode": "tp=8 dcp=8"}, "--decode: tp: found '8 dcp=8' where a whole number is expected"),
    "another word": ({"prefill": "tensor=4"}, "--prefill: there is no setting 'tensor'; "),
    "a near word": ({"decode": "interleav=1"}, "--decode: there is no setting 'interleav'; did you mean interleave?"),
    "capitals": ({"prefill": "TP=4"}, "--prefill: there is no setting 'TP'; "),
    "twice": ({"prefill": "tp=4,tp=8"}, "--prefill: tp is given twice"),
    "a word": ({"prefill": "tp=four"}, "--prefill: tp: found 'four' where a whole number is expected"),
    "a fraction": ({"prefill": "tp=4.0"}, "--prefill: tp: found '4.0' where a whole number is expected"),
    "no number": ({"prefill": "tp="}, "--prefill: tp: found '' where a whole number is expected"),
    "underscores": ({"tokens": "4_096"}, "--tokens: found '4_096' where a whole number is expected"),
    "other digits": ({"tokens": "\u0664\u0660"}, r"--tokens: found '\u0664\u0660' where a whole number is expected"),
    "a number without end": ({"tokens": "9" * 5000}, "--tokens: found '9999999999999999999999999999999999999999..."),
    "line breaks": ({"tokens": "1\n2"}, r"--tokens: found '1\n2' where a whole number is expected"),
    "no tokens": ({"tokens": "0"}, "--tokens: found 0, must be from 1 to 1048576"),
    "fewer than none": ({"tokens": "-5"}, "--tokens: found -5, must be from 1 to 1048576"),
    "too many tokens": ({"tokens": "2000000"}, "--tokens: found 2000000, must be from 1 to 1048576"),
    "no heads": ({"kv_heads": "0"}, "--kv-heads: found 0, must be from 1 to 1048576"),
    "no layers": ({"layers": "0"}, "--layers: found 0, must be from 1 to 10000"),
    "no bytes": ({"entry_bytes": "0"}, "--entry-bytes: found 0, must be from 1 to 1048576"),
    "an unknown type": ({"dtype": "fp7"}, "--dtype: there is no 'fp7'; the types are float32, bfloat16, float16, fp8"),
    "bytes and type": ({"entry_bytes": "512", "dtype": "fp8"}, "--entry-bytes already says what --head-size and "),
    "too many ranks": ({"prefill": "tp=512"}, "--prefill: kv-plan takes up to 256 ranks, found 512"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "sentence"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_spelling_is_one_sentence_and_exit_2(options: dict[str, str], sentence: str) -> None:
    result = run(changed(**options))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"dcpctl: {sentence}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", ["", "--prefill tp=4", f"{ISSUE} --transport ib", f"{ISSUE} -o yaml"])
def test_a_wrong_call_exits_with_2(arguments: str) -> None:
    result = run(arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("usage: ")


REFUSED = {
    "dcp doesn't divide": (
        {"decode": "tp=8,dcp=3,interleave=1,block=16"},
        ["decode: dcp size 3 doesn't divide the 8 ranks that hold each KV head", "[dcp-divides-tp]"],
    ),
    "interleave doesn't divide": (
        {"decode": "tp=8,dcp=8,interleave=3,block=16"},
        ["decode: interleave 3 doesn't divide block size 16; nearest", "[interleave-divides-block]"],
    ),
    "heads are shared out unevenly": (
        {"kv_heads": "3"},
        ["prefill: tensor parallel size 4 and 3 KV heads", "[heads-divide-tp]", "decode: tensor parallel size 8"],
    ),
    "T 12, H 2, W 4": (
        {"decode": "tp=12,dcp=4,block=16", "kv_heads": "2"},
        ["decode: dcp size 4 doesn't divide the 6 ranks", "[gqa-dcp-replicas]"],
    ),
    "no ranks": (
        {"prefill": "tp=0"},
        ["prefill: tensor parallel size is 0; it has to be from 1 to", "[size-in-range]"],
    ),
    "a negative block": ({"prefill": "block=-1"}, ["prefill: ", "block size is -1", "[size-in-range]"]),
}


@pytest.mark.parametrize(("options", "parts"), REFUSED.values(), ids=REFUSED.keys())
def test_a_side_that_cannot_be_is_refused_with_its_rule_and_exit_1(options: dict[str, str], parts: list[str]) -> None:
    result = run(changed(**options))
    assert (result.returncode, result.stdout) == (1, "")
    for part in parts:
        assert part in result.stderr


def test_without_numpy_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None; sys.argv[0] = 'dcpctl'\n"
        "from dcp_operator.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "kv-plan", *ISSUE.split()], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stderr == "dcpctl: kv-plan needs numpy, which isn't installed: pip install numpy\n"


def test_it_loads_no_more_than_numpy_and_the_plans() -> None:
    code = (
        "import contextlib, io, sys; from dcp_operator.cli import main\n"
        f"with contextlib.redirect_stdout(io.StringIO()): main({['kv-plan', *ISSUE.split()]!r})\n"
        "print(*sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    assert {"numpy", "dcp_connector.forecast"} <= loaded
    assert not {"kopf", "kubernetes", "aiohttp", "zmq", "dcp_operator.rules.engine"} & loaded
