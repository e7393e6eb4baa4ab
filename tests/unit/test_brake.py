"""The brake on writes that don't last: how often it lets the same be done, and what it never holds up."""

import itertools

from dcp_operator.brake import FREE, MAX_S, Brake
from dcp_operator.kinds import Ref
from dcp_operator.plan import Apply, Delete, Plan


def rewrite(name: str = "chat", why: str = "spec.ports differs") -> Apply:
    return Apply({"kind": "Service", "metadata": {"name": name}}, why, is_new=False)


def race(brake: Brake, seconds: float, action: Apply | Delete, start: float = 0.0) -> list[float]:
    """Ask for one action every tenth of a second; return when it was admitted."""
    times = []
    for tenth in range(int(seconds * 10)):
        now = start + tenth / 10
        admitted, _ = brake.admit(Plan((action,)), now)
        if admitted.actions:
            brake.record(admitted, now)
            times.append(now)
    return times


def test_the_first_repetitions_are_free_and_then_each_waits_twice_as_long():
    times = race(Brake(), 300.0, rewrite())
    gaps = [round(after - before) for before, after in itertools.pairwise(times)]
    assert gaps[: FREE - 1] == [0] * (FREE - 1)
    assert gaps[FREE - 1 : FREE + 8] == [1, 2, 4, 8, 16, 32, MAX_S, MAX_S, MAX_S]


def test_a_write_that_lasts_for_a_while_is_made_at_once_when_it_is_needed_again():
    brake = Brake()
    race(brake, 20.0, rewrite())
    assert race(brake, 1.0, rewrite(), start=300.0)[:2] == [300.0, 300.1]


def test_other_children_and_other_causes_are_not_held_up():
    brake = Brake()
    race(brake, 20.0, rewrite())
    others = (rewrite("other"), rewrite(why="missing"), Delete(Ref("Service", "chat"), "uid", "not wanted any more"))
    admitted, wait = brake.admit(Plan((rewrite(), *others)), 20.0)
    assert admitted.actions == others
    assert wait is not None
    assert 0 < wait <= 16


def test_what_has_to_wait_is_told_when_it_is_done():
    brake = Brake()
    plan = Plan((rewrite(),))
    for number in range(1, FREE):
        assert brake.record(plan, float(number)) == []
    assert brake.record(plan, 10.0) == [(rewrite(), 1.0)]
