"""Every byte that a decode rank must hold, after a transfer through the real TransferEngine between two processes.

The oracle (`kv_oracle`) deals tokens to ranks by counting and shares no formula with the product.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kv_oracle import Physical, Sizes
from tests.support.transfer_cases import DIMENSIONS, NUM_LAYERS, Case, cases
from tests.support.transfer_pair import ENTRY_BYTES, Host, Pair, hosts, opened

CASES = cases()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    with hosts(tmp_path_factory.mktemp("transfer")) as started:
        yield started


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_byte_arrives_and_no_other_changes(both: tuple[Host, Host], case: Case) -> None:
    pair = case.pair
    prefill_ranks, decode_ranks = pair.prefill.t * pair.stages[0], pair.decode.t * pair.stages[1]
    copies = pair.decode.t // pair.decode.w if pair.decode.t >= pair.decode.h else pair.decode.h
    with opened(both, pair) as transfers:
        for start, end in case.ranges:
            transfer_id = f"{start} {end}"
            transfers.hold(transfer_id, end)
            result = transfers.load(transfer_id, start, end)
            sent = transfers.sent(transfer_id)
            assert result["received"] == [None] * decode_ranks, (start, end)
            assert result["different"] == [0] * decode_ranks, (start, end)
            assert result["failed_blocks"] == []
            assert len(sent["sent"]) == prefill_ranks
            assert set(sent["sent"]) <= {None, "released"}, (start, end)
            expected_bytes = (end - start) * copies * ENTRY_BYTES * NUM_LAYERS
            assert result["stats"]["bytes_received"] == sent["stats"]["bytes_sent"] == expected_bytes
            assert case["path"] == "auto" or set(sent["stats"]["paths"]) == {case["path"]}


MIXED = {
    ("direct", "scatter"): Pair(Sizes(2, 2, 8, 24, 1), Sizes(3, 3, 4, 8, 1), entry_bytes=8192),
    ("pack", "scatter"): Pair(Sizes(2, 2, 8, 8, 1), Sizes(3, 3, 4, 16, 1), entry_bytes=8192),
}


@pytest.mark.parametrize("paths", MIXED, ids=" and ".join)
def test_rank_pairs_of_one_request_may_take_different_paths(both: tuple[Host, Host], paths: tuple[str, str]) -> None:
    pair, end = MIXED[paths], 131
    sizes = pair.prefill
    with opened(both, pair) as transfers:
        transfers.decode.ask(do="clear")
        source = transfers.table(sizes, end)
        transfers.prefill.ask(do="hold", transfer_id="mixed", num_tokens=end, table=source, fill=False)
        table = transfers.table(pair.decode, end)
        result = transfers.load("mixed", 0, end, table=table, unchecked=True)
        assert result["received"] == [None] * pair.decode.t
        peer = {"peer_sizes": [sizes.t, sizes.w, sizes.i, sizes.b, sizes.h], "peer_blocks": pair.num_blocks}
        found = transfers.decode.ask(do="verify", table=table, peer_table=source, end=end, **peer)
        assert found["different"] == [0] * pair.decode.t
        assert set(transfers.sent("mixed")["stats"]["paths"]) == set(paths)


PACKED = Physical(("layer", "block", "row", "head"))
UNEQUAL = Physical(("kv", "layer", "block", "head", "row"), registered="two tensors", value_bytes=4)
UNEQUAL_PAIRS = {
    "both apart": (UNEQUAL, UNEQUAL),
    "decode packs": (UNEQUAL, PACKED),
    "prefill packs": (PACKED, UNEQUAL),
}


@pytest.mark.parametrize("path", DIMENSIONS["path"])
@pytest.mark.parametrize("sides", UNEQUAL_PAIRS)
def test_page_sets_of_unequal_entries_arrive(both: tuple[Host, Host], sides: str, path: str) -> None:
    prefill, decode = UNEQUAL_PAIRS[sides]
    pair = Pair(Sizes(4, 2, 4, 16, 2), Sizes(2, 1, 16, 16, 2), prefill, decode, {"path": path}, key_bytes=12)
    with opened(both, pair) as transfers:
        transfers.hold("unequal", 70)
        result = transfers.load("unequal", 16, 70)
        assert (result["received"], result["different"]) == ([None, None], [0, 0])


def test_a_decode_rank_that_asks_before_the_prompt_is_computed_gets_it_then(both: tuple[Host, Host]) -> None:
    with opened(both, Pair(Sizes(1, 1, 16, 16, 1), Sizes(2, 2, 1, 16, 1))) as transfers:
        transfers.start_load("early", 0, 70)
        transfers.hold("early", 70)
        result = transfers.finish_load()
        assert result["received"] == [None, None]
        assert result["different"] == [0, 0]
        assert transfers.sent("early")["sent"] == [None]


def test_opaque_pages_are_copied_whole_between_equal_layouts(both: tuple[Host, Host]) -> None:
    side = Sizes(2, 1, 16, 16, 2)
    with opened(both, Pair(side, side, both_facts={"page_format": "opaque"})) as transfers:
        transfers.hold("opaque", 70)
        result = transfers.load("opaque", 16, 70, whole_pages=True)
        assert result["received"] == [None, None]
        assert result["different"] == [0, 0]


def test_opaque_pages_of_unequal_layouts_are_refused(both: tuple[Host, Host]) -> None:
    pair = Pair(Sizes(1, 1, 16, 16, 1), Sizes(2, 2, 1, 16, 1), both_facts={"page_format": "opaque"})
    with opened(both, pair) as transfers:
        transfers.hold("opaque", 70)
        result = transfers.load("opaque", 0, 70, expect_untouched=True)
        assert result["received"] == ["incompatible", "incompatible"]
        assert result["different"] == [0, 0]
        assert transfers.sent("opaque")["sent"] == ["released"]
