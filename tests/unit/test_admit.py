"""Which pulls a prefill rank serves out of a prompt that it holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dcp_connector.admit import admit
from dcp_connector.errors import PeerError, Reason
from dcp_connector.geometry import SideLayout
from dcp_connector.wire import Layout, token_digest
from tests.support.transfer_messages import a_hold, a_pull

SIDE = SideLayout(1, 1, 16, 16, 1)


def test_a_pull_that_fits_names_all_ranks_that_are_served_with_it() -> None:
    assert admit(a_pull(), a_hold(), SIDE, 0) == {0, 1}
    assert admit(a_pull(decode_stages=2), a_hold(), SIDE, 0) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("fields", "reason", "words"),
    [
        ({"start": 3}, Reason.OUT_OF_BOUNDS, r"the tokens \[3, 3\)"),
        ({"start": 2**40}, Reason.OUT_OF_BOUNDS, "the tokens"),
        ({"end": 4}, Reason.SHORT_PROMPT, "asks for 4 tokens, prefill computed 3"),
        ({"digest": b"other"}, Reason.OTHER_PROMPT, "another prompt"),
        ({"layout": Layout(3, 2, 1, 16, 1)}, Reason.INCOMPATIBLE, "3"),
        ({"layout": Layout(2**20, 1, 16, 16, 1)}, Reason.INCOMPATIBLE, "1048576 ranks, at most 16384"),
        ({"decode_stages": 1024, "layout": Layout(64, 1, 16, 16, 1)}, Reason.INCOMPATIBLE, "65536 ranks"),
    ],
)
def test_a_pull_that_may_not_run_is_refused_with_its_reason(fields: dict[str, Any], reason: Reason, words: str) -> None:
    with pytest.raises(PeerError, match=words) as refusal:
        admit(a_pull(**fields), a_hold(), SIDE, 0)
    assert refusal.value.reason is reason


def test_a_part_of_the_prompt_is_served_by_its_own_digest() -> None:
    part = token_digest(np.arange(2, dtype="<i4").tobytes(), "")
    assert admit(a_pull(end=2, digest=part), a_hold(), SIDE, 0) == {0, 1}
