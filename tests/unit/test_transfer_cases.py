"""The cases of the byte tests cover what they claim to."""

from itertools import combinations, product

from dcp_connector.mapping import check_pair
from tests.support.transfer_cases import DIMENSIONS, NUM_LAYERS, SIDES, cases, met

CASES = cases()


def test_every_two_values_of_different_dimensions_meet_in_a_case():
    wanted = {
        ((a, x), (b, y))
        for (a, left), (b, right) in combinations(enumerate(DIMENSIONS.values()), 2)
        for x, y in product(left, right)
    }
    assert {pair for case in CASES for pair in met(case)} == wanted


def test_at_least_a_hundred_and_twenty_pairs_go_through_the_transfer_engine():
    assert len({case.values for case in CASES}) == len(CASES) >= 120


def test_every_case_is_a_pair_that_fits_with_ranges_that_its_blocks_hold():
    for case in CASES:
        pair = case.pair
        check_pair(pair.prefill.layout(), pair.decode.layout())
        assert pair.prefill.b % pair.prefill_physical.kernel_blocks_per_block == 0
        assert pair.decode.b % pair.decode_physical.kernel_blocks_per_block == 0
        assert max(pair.stages) <= NUM_LAYERS
        for start, end in case.ranges:
            assert start < end
            assert start % (pair.decode.b * pair.decode.w) == 0
            for side in (pair.prefill, pair.decode):
                assert end <= pair.num_blocks * side.b * side.w


def test_the_ranges_leave_ranks_without_tokens_and_end_at_on_and_behind_block_edges():
    for case in CASES:
        decode = case.pair.decode
        span = decode.b * decode.w
        ends = {(end - start) % span for start, end in case.ranges}
        assert {0, 1, span - 1} <= ends
    assert any(end - start < decode[1] * decode[2] for _, decode in SIDES.values() for start, end in ((0, 1), (0, 5)))
