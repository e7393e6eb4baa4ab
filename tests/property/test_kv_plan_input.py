"""Whatever `dcpctl kv-plan` is given, the answer is a plan, a refusal with its rules, or one sentence."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_operator.cli.kv_plan import Asked, kv_plan
from dcp_operator.cli.problems import CliError

NUMBERS = st.one_of(st.integers(-3, 40).map(str), st.text(max_size=8), st.sampled_from(["", "1e3", "+4", " 8", "0x10"]))
SETTINGS = st.tuples(st.sampled_from(["tp", "dcp", "interleave", "block", "tensor", ""]), NUMBERS)
SIDES = st.one_of(
    st.text(max_size=20), st.lists(SETTINGS.map(lambda pair: f"{pair[0]}={pair[1]}"), max_size=5).map(",".join)
)


@settings(max_examples=150, deadline=None)
@given(
    prefill=SIDES,
    decode=SIDES,
    kv_heads=NUMBERS,
    tokens=NUMBERS,
    layers=NUMBERS,
    head_size=st.none() | NUMBERS,
    dtype=st.none() | st.sampled_from(["fp8", "float32", "int4", ""]),
    entry_bytes=st.none() | NUMBERS,
    transport=st.sampled_from(["tcp", "rdma"]),
    output=st.sampled_from(["text", "json"]),
)
def test_no_input_ends_in_anything_but_words(output: str, **words: Any) -> None:
    sentence, outcome = "", None
    try:
        outcome = kv_plan(Asked(**words), output=output)
    except CliError as error:
        sentence = str(error)
    assert bool(sentence) == (outcome is None)
    assert "\n" not in sentence
    if outcome is None:
        return
    assert outcome.code in (0, 1)
    assert bool(outcome.out) == (outcome.code == 0)
    assert all("[" in note for note in outcome.notes)
    assert bool(outcome.notes) == (outcome.code == 1)
