"""Finding a data-parallel rank behind the address of another."""

import pytest

from dcp_connector.siblings import are_siblings, data_parallel_rank, sibling_origin

HERE = "http://10.0.0.1:9000"


@pytest.mark.parametrize(
    ("engine_id", "rank"), [("a_dp0", 0), ("a_dp12", 12), ("a", None), ("_dp1", None), ("a_dp", None)]
)
def test_the_rank_is_what_vllm_appends_to_the_engine_id(engine_id: str, rank: int | None) -> None:
    assert data_parallel_rank(engine_id) == rank


@pytest.mark.parametrize(
    ("found", "wanted", "origin"),
    [
        ("a_dp0", "a_dp2", "http://10.0.0.1:9002"),
        ("a_dp2", "a_dp0", "http://10.0.0.1:8998"),
        ("a_dp0", "b_dp2", None),
        ("a_dp0", "a_dp0", None),
        ("a_dp0", "a", None),
        ("a", "a_dp1", None),
        ("a_dp0", "a_dp99999", None),
    ],
)
def test_ranks_of_one_engine_listen_on_successive_ports(found: str, wanted: str, origin: str | None) -> None:
    assert sibling_origin(HERE, found, wanted) == origin
    assert are_siblings(found, wanted) == (wanted.startswith("a_dp") and found.startswith("a_dp") and found != wanted)


def test_addresses_of_ipv6_keep_their_brackets_and_ports_end_at_65535() -> None:
    assert sibling_origin("http://[fd00::1]:8998", "a_dp0", "a_dp1") == "http://[fd00::1]:8999"
    assert sibling_origin("http://10.0.0.1:65535", "a_dp0", "a_dp1") is None
