"""About a minute of fuzzing, the same inputs each time. `python -m tests.fuzz` goes on with others."""

from __future__ import annotations

import pytest

from tests.fuzz.run import run
from tests.fuzz.targets import TARGETS

_SECONDS = 12.0


@pytest.mark.parametrize("name", TARGETS)
def test_nearly_right_inputs_crash_nothing_and_leave_nothing_behind(name: str) -> None:
    tally = run(name, seed=20_261_130, seconds=_SECONDS)
    print(tally)
    assert tally.num_inputs > 500
    assert 0 < tally.taken < tally.num_inputs, "the inputs are all alike"
