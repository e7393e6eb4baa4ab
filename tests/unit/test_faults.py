"""A fault at every call of a change: afterwards the cluster is as the spec says, and nothing of others was touched."""

import functools
from collections.abc import Callable

import pytest

from tests.support.faulty_world import CUT_TURNS, FAULTS, FaultyWorld
from tests.support.objects import spec
from tests.support.profiles import examples

#: Turns beyond those of a run without a fault: the pass that failed, and what was hidden meanwhile.
EXTRA_TURNS = CUT_TURNS + 3
#: The check of transfers asks pods, and there are none.
NO_CHECK = {"transferCheck": {"enabled": False}}
TWO = {**NO_CHECK, **{role: {**spec()[role], "replicas": 2} for role in ("prefill", "decode")}}
ONE = {**NO_CHECK, "prefill": spec()["prefill"], "decode": spec()["decode"]}
MOST_TURNS = 40
#: Each fault meets every so manieth call, each at others, so that every call meets some; all meet all with CI set.
STRIDE = examples(dev=6, ci=1)

Step = Callable[[FaultyWorld], None]


def _edit(**changes) -> Step:
    return lambda world: world.put(**{**TWO, **changes})


def _there_and_back(world: FaultyWorld) -> None:
    world.put(**TWO, image="acme/engine:2")
    world.turn()
    world.turn()
    world.put(**TWO)


def _made_anew(world: FaultyWorld) -> None:
    world.remove()
    world.turn()
    world.put(**TWO)


#: What exists before, and the change.
CHANGES: dict[str, tuple[bool, Step]] = {
    "an object is made": (False, _edit()),
    "a new revision": (True, _edit(image="acme/engine:2")),
    "a revision that is taken back": (True, _there_and_back),
    "fewer engines": (True, _edit(**ONE)),
    "a feature is turned off": (True, _edit(networkPolicy={"enabled": False})),
    "deleted and made anew": (True, _made_anew),
}


def begin(change: str) -> FaultyWorld:
    world = FaultyWorld()
    if CHANGES[change][0]:
        world.put(**TWO)
        world.rest(MOST_TURNS)
    return world


@functools.cache
def reference(change: str) -> tuple[dict, int, int]:
    """The outcome of a change without a fault, in how many turns and calls."""
    world = begin(change)
    world.arm(None, None)
    CHANGES[change][1](world)
    turns = world.rest(MOST_TURNS)
    return world.result(), turns, world.calls


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_fault_at_any_call_the_cluster_is_as_the_spec_says(change: str, fault: str):
    expected, turns, calls = reference(change)
    assert calls > 1
    stride = min(STRIDE, max(1, calls // 4))
    first = list(FAULTS).index(fault) % stride + 1
    for at in range(first, calls + 1, stride):
        world = begin(change)
        world.arm(at, FAULTS[fault])
        CHANGES[change][1](world)
        world.rest(turns + EXTRA_TURNS)
        assert world.crashes == ("killed" in fault), f"call {at}"
        if "revision" in change:
            assert world.fewest_pairs == 2, f"call {at}"
        assert world.result() == expected, f"call {at}"
        for body in world.foreign:
            place = (body["kind"], body["metadata"]["namespace"], body["metadata"]["name"])
            assert world.api.objects[place] == body, f"call {at}"
