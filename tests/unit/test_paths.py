"""Which path a pair of ranks takes."""

import pytest

from dcp_connector.paths import Fragments, choose_path, mean_fragments
from dcp_connector.units import KIB
from tests.support.kv_oracle import HEAD_MAJOR, TOKEN_MAJOR, Rank, Sizes


@pytest.mark.parametrize(
    ("direct", "packed", "transport", "override", "path"),
    [
        pytest.param(1152, 147456, "tcp", "auto", "pack", id="single tokens are packed over tcp"),
        pytest.param(1152, 147456, "rdma", "auto", "pack", id="single tokens are packed over rdma"),
        pytest.param(64 * KIB, 1024 * KIB, "tcp", "auto", "direct", id="64 KiB is enough over tcp"),
        pytest.param(64 * KIB - 1, 1024 * KIB, "tcp", "auto", "pack", id="just below 64 KiB is packed over tcp"),
        pytest.param(8 * KIB, 64 * KIB, "rdma", "auto", "direct", id="8 KiB is enough over rdma"),
        pytest.param(8 * KIB - 1, 64 * KIB, "rdma", "auto", "pack", id="just below 8 KiB is packed over rdma"),
        pytest.param(8 * KIB, 64 * KIB, "tcp", "auto", "pack", id="8 KiB is too little for tcp"),
        pytest.param(8 * KIB, 64 * KIB - 1, "tcp", "auto", "scatter", id="packed pages below 64 KiB too"),
        pytest.param(1152, 8 * KIB - 1, "rdma", "auto", "scatter", id="packed pages below 8 KiB for rdma"),
        pytest.param(63 * KIB, 125 * KIB, "tcp", "auto", "scatter", id="packing that gains too little isn't done"),
        pytest.param(64, 64, "tcp", "auto", "scatter", id="single tokens that packing can't join"),
        pytest.param(0, 0, "tcp", "auto", "direct", id="nothing to move"),
        pytest.param(1024 * KIB, 1024 * KIB, "tcp", "scatter", "scatter", id="scatter on request"),
        pytest.param(1000, 1000, "tcp", "pack", "pack", id="pack on request"),
        pytest.param(1, 1024 * KIB, "tcp", "direct", "direct", id="direct on request"),
    ],
)
def test_the_path_follows_from_the_fragments(direct, packed, transport, override, path):
    assert choose_path(Fragments(direct, packed), transport, override) == path


@pytest.mark.parametrize(
    ("direct", "packed", "override", "path"),
    [
        pytest.param(1000, 1999, "auto", "direct", id="packing that gains too little isn't done"),
        pytest.param(1000, 2000, "auto", "pack", id="packing that doubles the fragment is"),
        pytest.param(1000, 2000, "scatter", "pack", id="on request neither"),
        pytest.param(64 * KIB, 1024 * KIB, "scatter", "direct", id="large fragments go straight"),
    ],
)
def test_without_staging_memory_on_decode_the_next_best_path_is_taken(direct, packed, override, path):
    assert choose_path(Fragments(direct, packed), "tcp", override, can_scatter=False) == path


def _fragments(prefill, decode, *, physical=HEAD_MAJOR, num_blocks=100, heads=((0,), (0,)), shards=(0, 0)):
    prefill, decode = Sizes(*prefill), Sizes(*decode)
    src, dst = (Rank(side, 0, 0, num_blocks, 1, 100, physical).pages[0] for side in (prefill, decode))
    return mean_fragments(prefill.layout(), decode.layout(), *shards, src, dst, *heads)


@pytest.mark.parametrize(
    ("prefill", "decode", "options", "direct", "packed"),
    [
        pytest.param((1, 1, 1, 16, 1), (2, 2, 1, 16, 1), {}, 100, 1600, id="interleave 1: tokens or pages"),
        pytest.param((1, 1, 1, 16, 1), (2, 2, 8, 16, 1), {}, 800, 1600, id="interleave 8"),
        pytest.param((1, 1, 1, 16, 1), (2, 2, 16, 16, 1), {}, 1600, 1600, id="whole blocks either way"),
        pytest.param((1, 1, 1, 8, 1), (1, 1, 1, 32, 1), {}, 800, 3200, id="small source blocks"),
        pytest.param((2, 2, 1, 16, 1), (1, 1, 1, 16, 1), {}, 100, 100, id="two prefill shards: no gain"),
        pytest.param((1, 1, 1, 16, 1), (1, 1, 1, 16, 1), {"num_blocks": 2}, 1600, 1600, id="a tiny cache"),
        pytest.param((1, 1, 1, 16, 1), (2, 2, 1, 16, 1), {"num_blocks": 1}, 100, 1600, id="a cache of one block"),
        pytest.param(
            (1, 1, 1, 16, 2),
            (1, 1, 1, 16, 2),
            {"heads": ((0, 1), (0, 1)), "physical": TOKEN_MAJOR},
            3200,
            3200,
            id="all heads of whole pages",
        ),
        pytest.param((2, 2, 1, 16, 1), (2, 2, 1, 16, 1), {"shards": (0, 1)}, 0, 0, id="shards without a common token"),
    ],
)
def test_mean_fragments_are_those_of_blocks_that_are_not_neighbours(prefill, decode, options, direct, packed):
    fragments = _fragments(prefill, decode, **options)
    assert (fragments.direct_bytes, fragments.packed_bytes) == (direct, packed)
