"""What a pull means on either side."""

from __future__ import annotations

import numpy as np
import pytest

from dcp_connector.errors import PeerError, Reason
from dcp_connector.handshake import wire_layout, wire_page
from dcp_connector.pulls import plan_landing, plan_write
from dcp_connector.wire import Pull
from tests.support.kv_oracle import HEAD_MAJOR, Rank, Sizes
from tests.support.transfer_messages import a_pull

PREFILL, DECODE = Sizes(4, 2, 4, 16, 2), Sizes(8, 4, 2, 16, 2)
END = 100


def pages(sizes: Sizes, rank: int, count: int = 3) -> dict:
    made = Rank(sizes, rank, 0, 8, count, 16, HEAD_MAJOR).pages
    return {f"layer.{number}": page for number, page in enumerate(made)}


def pull_of(decode_rank: int, prefill_rank: int, **fields: object) -> Pull:
    mine = pages(DECODE, decode_rank % DECODE.t)
    return a_pull(
        decode_rank=decode_rank,
        prefill_rank=prefill_rank,
        end=END,
        layout=wire_layout(DECODE.layout()),
        pages={name: wire_page(page) for name, page in mine.items()},
        block_table=np.array([5, 2], dtype="<i8").tobytes(),
        **fields,
    )


def write(pull: Pull, tp_rank: int, *, whole_pages: bool = False):
    return plan_write(pull, (1, 3, 0, 2), pages(PREFILL, tp_rank), PREFILL.layout(), tp_rank, whole_pages=whole_pages)


@pytest.mark.parametrize("stage", [0, 1], ids=["first stage", "second stage"])
def test_both_sides_plan_the_same_chunks_for_every_pair_of_ranks(stage: int) -> None:
    pairs = 0
    for decode_rank in range(DECODE.t):
        for tp_rank in range(PREFILL.t):
            pull = pull_of(stage * DECODE.t + decode_rank, stage * PREFILL.t + tp_rank)
            try:
                plan = write(pull, tp_rank)
            except PeerError:
                with pytest.raises(PeerError):
                    plan_landing(pull, PREFILL.layout(), 64)
                continue
            landing = plan_landing(pull, PREFILL.layout(), 64)
            assert landing.chunks == plan.chunks(64)
            assert [len(found.units) for found in landing.entries] == [len(found.units) for found in plan.entries()]
            pairs += bool(landing.chunks)
    # Two heads, two prefill shards, four decode shards; interleave 4 and 2 make each decode shard need one or both.
    assert pairs >= 8


def test_a_rank_that_is_no_source_is_refused_on_both_sides() -> None:
    pull = pull_of(decode_rank=0, prefill_rank=3)
    for plan in (lambda: write(pull, 3), lambda: plan_landing(pull, PREFILL.layout(), 64)):
        with pytest.raises(PeerError, match="prefill rank 3 is no source of rank 0") as error:
            plan()
        assert error.value.reason is Reason.INCOMPATIBLE


def test_layers_that_prefill_does_not_have_are_refused_by_name() -> None:
    pull = pull_of(decode_rank=0, prefill_rank=0)
    pull.pages["layer.9"] = pull.pages["layer.0"]
    with pytest.raises(PeerError, match=r"asks for 4 layers, of which prefill rank 0 doesn't have \['layer.9'\]"):
        write(pull, 0)


def test_opaque_pages_are_moved_to_the_end_of_decodes_last_block() -> None:
    side = Sizes(1, 1, 16, 16, 1)
    pull = a_pull(
        end=20,
        layout=wire_layout(side.layout()),
        pages={name: wire_page(page) for name, page in pages(side, 0).items()},
        block_table=np.array([5, 2], dtype="<i8").tobytes(),
    )
    for whole_pages, tokens in ((False, 20), (True, 32)):
        plan = plan_write(pull, (1, 3), pages(side, 0), side.layout(), 0, whole_pages=whole_pages)
        assert plan.runs.total_tokens == tokens
