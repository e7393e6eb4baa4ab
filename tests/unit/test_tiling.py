"""The proof that runs before any transfer: right mappings pass, every kind of wrong one is refused in words."""

from dataclasses import replace

import numpy as np
import pytest

from dcp_connector.mapping import Runs, Source, plan_runs
from dcp_connector.tiling import TilingError, verify_tiling
from tests.support.kv_oracle import Sizes

PREFILL = Sizes(2, 2, 2, 8, 1).layout()
DECODE = Sizes(4, 4, 1, 4, 1).layout()


def _changed(column, change):
    """Return a planner whose runs have one column changed."""

    def plan(*arguments):
        runs = plan_runs(*arguments)
        return replace(runs, **{column: change(getattr(runs, column).copy())})

    return plan


def _without_last(*arguments):
    runs = plan_runs(*arguments)
    return Runs(*(getattr(runs, name)[:-1] for name in ("src_block", "src_row", "dst_block", "dst_row", "num_tokens")))


def _twice(*arguments):
    runs = plan_runs(*arguments)
    columns = (runs.src_block, runs.src_row, runs.dst_block, runs.dst_row, runs.num_tokens)
    return Runs(*(np.concatenate([column, column]) for column in columns))


def _earlier(prefill, decode, prefill_shard, decode_shard, start, end):
    return plan_runs(prefill, decode, prefill_shard, decode_shard, start - decode.virtual_block_size, end)


def _other_shard(prefill, decode, prefill_shard, decode_shard, start, end):
    return plan_runs(prefill, decode, prefill_shard, (decode_shard - 1) % decode.dcp_size, start, end)


def _interleave_ignored(prefill, decode, *rest):
    return plan_runs(prefill, replace(decode, interleave=decode.block_size), *rest)


def test_the_real_mapping_passes():
    for rank in range(4):
        verify_tiling(PREFILL, DECODE, rank)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        pytest.param(_without_last, "is written 0 times instead of once", id="a row is lost"),
        pytest.param(_twice, "is written 2 times instead of once", id="a row is written twice"),
        pytest.param(_earlier, "writes rows outside", id="rows before the range"),
        pytest.param(_other_shard, "needs token|writes rows outside", id="the shards are swapped"),
        pytest.param(_interleave_ignored, "needs token|writes rows outside", id="decode's interleave is ignored"),
        pytest.param(_changed("src_row", lambda rows: rows ^ 1), "needs token", id="source rows are swapped"),
        pytest.param(_changed("dst_row", lambda rows: rows ^ 1), "needs token", id="destination rows are swapped"),
        pytest.param(_changed("src_row", lambda rows: rows + 8), "leaves the 8 rows", id="source rows past the block"),
        pytest.param(_changed("dst_row", lambda rows: rows - 4), "leaves the 4 rows", id="negative destination rows"),
        pytest.param(_changed("num_tokens", lambda n: n * 0), "leaves the 8 rows", id="runs without tokens"),
    ],
)
def test_a_wrong_plan_is_refused(plan, words):
    with pytest.raises(TilingError, match=words):
        verify_tiling(PREFILL, DECODE, 1, plan=plan)


@pytest.mark.parametrize(
    ("assigned", "words"),
    [
        pytest.param((), r"head 0, row \d+ is written 0 times", id="nobody sends"),
        pytest.param((Source(0, 0, (0,)), Source(0, 0, (0,))), r"row \d+ is written 2 times", id="two send the same"),
        pytest.param((Source(1, 0, (0,)),), "the prefill rank doesn't hold shard 0", id="a rank of another shard"),
        pytest.param(
            (Source(0, 0, (0, 1)),), r"the prefill rank doesn't hold heads \[1\]", id="a rank of another head"
        ),
    ],
)
def test_wrong_sources_are_refused(assigned, words):
    with pytest.raises(TilingError, match=words):
        verify_tiling(PREFILL, DECODE, 1, assigned=assigned)


def test_a_head_that_decode_does_not_hold_is_refused():
    prefill, decode = Sizes(1, 1, 1, 4, 2).layout(), Sizes(2, 1, 1, 4, 2).layout()
    with pytest.raises(TilingError, match="head 0 isn't one of the decode rank's heads"):
        verify_tiling(prefill, decode, 1, assigned=(Source(0, 0, (0, 1)),))


def test_the_words_name_both_ranks_and_the_range():
    where = r"^decode rank 1, prefill rank 0, tokens \[16, 57\): row 4 needs token 17, would get token 16$"
    with pytest.raises(TilingError, match=where):
        verify_tiling(PREFILL, DECODE, 1, plan=_changed("src_row", lambda rows: rows ^ 1))


def test_a_proof_of_layouts_with_a_huge_period_is_bounded():
    seen = []

    def plan(*arguments):
        seen.append(arguments[-2:])
        return plan_runs(*arguments)

    verify_tiling(Sizes(1, 1, 1, 1009, 1).layout(), Sizes(1, 1, 1, 1013, 1).layout(), 0, plan=plan)
    assert seen == [(1013, 1013 + 131072)]
