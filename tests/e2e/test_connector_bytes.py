"""Every byte that a decode rank must hold, after a transfer through the real TransferEngine between two processes.

The oracle (`kv_oracle`) deals tokens to ranks by counting and shares no formula with the product.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kv_oracle import TOKEN_MAJOR, Physical, Sizes
from tests.support.transfer_pair import ENTRY_BYTES, NUM_LAYERS, Host, Pair, hosts, opened

PAIRS = {
    "one rank to one rank": Pair(Sizes(1, 1, 16, 16, 1), Sizes(1, 1, 16, 16, 1)),
    "TP 1 to DCP 2, interleave 1": Pair(Sizes(1, 1, 16, 16, 1), Sizes(2, 2, 1, 16, 1)),
    "TP 1 to DCP 2, interleave 4": Pair(Sizes(1, 1, 16, 16, 1), Sizes(2, 2, 4, 16, 1)),
    "TP 1 to DCP 2, interleave = block": Pair(Sizes(1, 1, 16, 16, 1), Sizes(2, 2, 16, 16, 1)),
    "TP 2 with split heads to TP 4, DCP 2": Pair(Sizes(2, 1, 16, 16, 2), Sizes(4, 2, 1, 16, 2)),
    "four heads on one rank to replicas": Pair(Sizes(1, 1, 16, 16, 4), Sizes(8, 2, 2, 16, 4)),
    "DCP 2 to one rank": Pair(Sizes(2, 2, 1, 16, 1), Sizes(1, 1, 16, 16, 1)),
    "DCP 2 to DCP 3": Pair(Sizes(2, 2, 4, 16, 1), Sizes(3, 3, 2, 16, 1)),
    "blocks of 16 to blocks of 32": Pair(Sizes(1, 1, 16, 16, 1), Sizes(2, 2, 8, 32, 1)),
    "token-major pages, kernel block smaller than block": Pair(
        Sizes(1, 1, 16, 16, 2),
        Sizes(2, 1, 16, 16, 2),
        TOKEN_MAJOR,
        Physical(("block", "layer", "head", "row"), padding=16, kernel_blocks_per_block=2),
    ),
    "replicated heads on both sides": Pair(Sizes(4, 1, 16, 16, 1), Sizes(4, 2, 8, 16, 1)),
}
#: start, end: around the edges of blocks (16, 32) and virtual blocks, and with a prefix that decode has.
RANGES = ((0, 1), (0, 15), (0, 33), (0, 131), (96, 131), (96, 192))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    with hosts(tmp_path_factory.mktemp("transfer")) as started:
        yield started


@pytest.mark.parametrize("path", ["direct", "pack"])
@pytest.mark.parametrize("name", PAIRS)
def test_every_byte_arrives_and_no_other_changes(both: tuple[Host, Host], name: str, path: str) -> None:
    pair = Pair(**{**vars(PAIRS[name]), "config": {"path": path, "max_batch_descriptors": 100}})
    with opened(both, pair) as transfers:
        for start, end in RANGES:
            start -= start % (pair.decode.b * pair.decode.w)
            transfer_id = f"{name} {start} {end}"
            transfers.hold(transfer_id, end)
            result = transfers.load(transfer_id, start, end)
            sent = transfers.sent(transfer_id)
            assert result["received"] == [None] * pair.decode.t, (start, end)
            assert result["different"] == [0] * pair.decode.t, (start, end)
            assert result["failed_blocks"] == []
            assert set(sent["sent"]) <= {None, "released"}, (start, end)
            copies = pair.decode.t // pair.decode.w if pair.decode.t >= pair.decode.h else pair.decode.h
            expected_bytes = (end - start) * copies * ENTRY_BYTES * NUM_LAYERS
            assert result["stats"]["bytes_received"] == sent["stats"]["bytes_sent"] == expected_bytes
            assert set(sent["stats"]["paths"]) == {path}


def test_a_decode_rank_that_asks_before_the_prompt_is_computed_gets_it_then(both: tuple[Host, Host]) -> None:
    with opened(both, PAIRS["TP 1 to DCP 2, interleave 1"]) as transfers:
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
