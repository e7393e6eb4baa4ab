"""Whole rollouts, simulated: they end, no step takes more than it may, and no step knows of an earlier one."""

import itertools
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_operator.api.spec import RolloutStrategy
from dcp_operator.rollout.planner import next_step
from dcp_operator.rollout.shares import Pair, bounds_of, engines_of
from dcp_operator.rollout.situation import Step
from tests.support.profiles import examples
from tests.support.rollout_world import Live, World, settled_shares

COUNT = st.integers(1, 7)
PAIRS = st.builds(Pair, COUNT, COUNT)
BOUND = st.one_of(st.integers(0, 3), st.sampled_from(["0%", "10%", "25%", "34%", "50%", "100%"]))


def is_nothing(value: int | str) -> bool:
    return value in (0, "0%")


@st.composite
def strategies(draw, *, skew: bool = True):
    surge, unavailable = draw(BOUND), draw(BOUND)
    if is_nothing(surge) and is_nothing(unavailable):
        surge = 1
    most = draw(st.sampled_from([None, 1, 2, "25%"])) if skew else None
    return RolloutStrategy(max_surge=surge, max_unavailable=unavailable, max_skew=most)


def strategy(surge: int, unavailable: int) -> RolloutStrategy:
    return RolloutStrategy(max_surge=surge, max_unavailable=unavailable)


class Judge:
    """Takes turns for the operator, and holds every single write to the bounds."""

    def __init__(self, world: World, *, is_strict: bool) -> None:
        self.world = world
        #: Whether replicas and strategy were never edited, so that the surge is the stated one, always.
        self.is_strict = is_strict

    def step(self, chance: random.Random | None = None) -> Step:
        """Make one step, or stop in the middle of it, as a controller that is killed does."""
        world = self.world
        step = world.step()
        writes = world.writes(step)
        if chance is not None:
            chance.shuffle(writes)
            writes = writes[: chance.randint(0, len(writes))]
        for write in writes:
            self.write(*write)
        self.paired(step)
        return step

    def write(self, *write) -> None:
        world = self.world
        bounds = bounds_of(world.wanted, world.strategy)
        before, total = world.serving(), world.total()
        world.write(*write)
        assert world.serving() >= min(before, bounds.floor), f"{write} takes serving capacity away: {world}"
        if self.is_strict:
            limits = Pair(*(r + s for r, s in zip(bounds.wanted, bounds.surge, strict=True)))
            limits = Pair(*map(max, limits, total))
            assert all(have <= most for have, most in zip(world.total(), limits, strict=True)), f"{write}: {world}"

    def paired(self, step: Step) -> None:
        """Hold a step to what it says of pairs."""
        if 0 in self.world.wanted:
            return
        for name, counts in step.replicas.items():
            has_both = counts.prefill > 0 and counts.decode > 0
            live = self.world.live.get(name, Live())
            assert has_both or counts.engines == (0, 0) or 0 in live.replicas, f"{name} gets {counts}: {self.world}"


EVENTS = st.lists(
    st.one_of(
        st.just(("step",)),
        st.just(("step",)),
        st.tuples(st.just("killed"), st.integers(0, 2**32)),
        st.just(("sync",)),
        st.tuples(st.just("ready"), st.integers(0, 30)),
        st.tuples(st.just("ready"), st.integers(0, 30)),
        st.just(("all ready",)),
        st.tuples(st.just("die"), st.integers(0, 30)),
        st.tuples(st.just("router"), st.integers(0, 3)),
        st.tuples(st.just("edit"), st.sampled_from("abcd")),
        st.just(("time",)),
        st.tuples(st.just("broken"), st.sampled_from("abcd")),
        st.tuples(st.just("room"), st.booleans()),
    ),
    max_size=60,
)
EDITS = st.one_of(
    st.tuples(st.just("replicas"), PAIRS),
    st.tuples(st.just("replicas"), st.sampled_from([Pair(0, 2), Pair(2, 0), Pair(0, 0)])),
    st.tuples(st.just("strategy"), strategies()),
    st.tuples(st.just("pause"), st.booleans()),
    st.tuples(st.just("routers"), st.integers(0, 3)),
)


def happen(world: World, judge: Judge, event: tuple) -> None:
    pods = world.pods()
    match event:
        case ("step",):
            judge.step()
        case ("killed", seed):
            judge.step(random.Random(seed))
        case ("sync",):
            world.sync()
        case ("ready", number) if pods:
            name, pod = pods[number % len(pods)]
            pod.is_ready = name not in world.broken
        case ("all ready",):
            for name, pod in pods:
                pod.is_ready = name not in world.broken
        case ("die", number) if pods:
            pods[number % len(pods)][1].is_ready = False
        case ("router", number) if world.live:
            live = list(world.live.values())[number % len(world.live)]
            live.router_is_up = not live.router_is_up
        case ("edit", revision):
            world.begin(revision)
        case ("time",):
            for _, pod in pods:
                pod.idle = 0 if pod.is_ready else pod.idle + 1
        case ("broken", revision):
            world.broken ^= {revision}
            for name, pod in pods:
                pod.is_ready &= name != revision
        case ("room", has_room):
            world.has_room = has_room
        case ("replicas", wanted):
            world.wanted = wanted
        case ("strategy", changed):
            world.strategy = changed
        case ("pause", is_paused):
            world.is_paused = is_paused
        case ("routers", routers):
            world.routers = routers


def recover(world: World, wanted: Pair) -> None:
    """Take everything away that keeps a rollout from ending; old revisions may stay as broken as they are."""
    world.broken.discard(world.target)
    world.has_room, world.is_paused = True, False
    if 0 in world.wanted:
        world.wanted = wanted


@settings(max_examples=examples(dev=100, ci=300), deadline=None)
@given(PAIRS, strategies(), st.integers(0, 3), EVENTS)
def test_whatever_happens_no_write_breaks_a_bound_and_the_rollout_ends(wanted, bounds, routers, events):
    world = World(wanted, bounds, routers=routers)
    judge = Judge(world, is_strict=True)
    for event in events:
        happen(world, judge, event)
    recover(world, wanted)
    world.finish()


@settings(max_examples=examples(dev=100, ci=300), deadline=None)
@given(PAIRS, strategies(), st.integers(0, 3), st.lists(st.one_of(EVENTS.map(tuple), st.tuples(EDITS)), max_size=6))
def test_edits_of_replicas_strategy_and_pause_at_any_step_take_nothing_away_and_it_ends(wanted, bounds, routers, parts):
    world = World(wanted, bounds, routers=routers)
    judge = Judge(world, is_strict=False)
    for event in itertools.chain.from_iterable(parts):
        happen(world, judge, event)
    recover(world, wanted)
    world.finish()


@settings(max_examples=40, deadline=None)
@given(PAIRS, strategies(), st.integers(0, 3), st.randoms(use_true_random=False))
def test_a_broken_new_revision_takes_away_no_more_than_may_be_unavailable(wanted, bounds, routers, chance):
    world = World(wanted, bounds, routers=routers)
    world.broken = {"b"}
    world.begin("b")
    judge = Judge(world, is_strict=True)
    floor = bounds_of(wanted, bounds).floor
    for _ in range(40):
        world.turn()
        judge.step(chance if chance.random() < 0.5 else None)
        assert world.serving() >= floor
    world.begin("a")
    world.finish()


@settings(max_examples=40, deadline=None)
@given(PAIRS, strategies(skew=False), st.randoms(use_true_random=False))
def test_when_the_new_revision_breaks_midway_the_old_one_comes_back_as_far_as_the_surge_allows(wanted, bounds, chance):
    world = World(wanted, bounds)
    world.begin("b")
    for _ in range(chance.randint(0, 6)):
        world.turn()
        Judge(world, is_strict=True).step()
    if len(world.live) < 2 or world.live["a"].routers is None:
        return
    world.broken = {"b"}
    for _ in range(10):
        world.turn()
        Judge(world, is_strict=True).step()
    limits = bounds_of(wanted, bounds)
    new = world.live["b"].replicas
    room = Pair(*(r + s - b for r, s, b in zip(wanted, limits.surge, new, strict=True)))
    share = min(limits.floor, *(Fraction(count, r) for count, r in zip(room, wanted, strict=True)))
    assert all(have >= need for have, need in zip(world.live["a"].replicas, engines_of(share, wanted), strict=True))


@settings(max_examples=40, deadline=None)
@given(PAIRS, PAIRS, strategies())
def test_scaling_goes_on_beside_a_new_revision_that_never_gets_ready(wanted, later, bounds):
    world = World(wanted, bounds)
    world.broken = {"b"}
    world.begin("b")
    for _ in range(3):
        world.turn()
        Judge(world, is_strict=True).step()
    if "a" not in world.live or world.live["a"].routers is None:
        return  # maxUnavailable let all of it go
    world.wanted = later
    for _ in range(8):
        world.turn()
        Judge(world, is_strict=False).step()
    limits = bounds_of(later, bounds)
    room = Pair(*(r + s - b for r, s, b in zip(later, limits.surge, world.live["b"].replicas, strict=True)))
    reachable = min(limits.floor, *(Fraction(max(count, 0), r) for count, r in zip(room, later, strict=True)))
    assert world.serving() >= reachable


@pytest.mark.parametrize("surge", range(4))
@pytest.mark.parametrize("unavailable", range(4))
def test_from_every_state_in_which_all_engines_are_ready_two_revisions_make_progress(surge, unavailable):
    if surge == unavailable == 0:
        return
    for wanted in itertools.starmap(Pair, itertools.product(range(1, 7), repeat=2)):
        world = World(wanted, strategy(surge, unavailable))
        world.begin("b")
        shares = sorted({Fraction(count, r) for r in wanted for count in range(r + 1)})
        for old, new in itertools.product(shares[1:], shares):
            settled_shares(world, {"a": old, "b": new})
            assert world.writes(world.step()), f"stands still: {world}"


@settings(max_examples=40, deadline=None)
@given(PAIRS, strategies(), st.lists(st.fractions(0, 1, max_denominator=7), min_size=2, max_size=4))
def test_from_every_number_of_revisions_that_serve_it_ends_even_if_no_rollout_led_there(wanted, bounds, shares):
    world = World(wanted, bounds)
    settled_shares(world, dict(zip("abcd", shares, strict=False)))
    world.begin("abcd"[len(shares) - 1])
    world.finish()


@pytest.mark.parametrize("surge", range(4))
@pytest.mark.parametrize("unavailable", range(4))
def test_every_rollout_of_up_to_six_engines_a_role_ends(surge, unavailable):
    if surge == unavailable == 0:
        return
    for wanted in itertools.starmap(Pair, itertools.product(range(1, 7), repeat=2)):
        world = World(wanted, strategy(surge, unavailable))
        judge = Judge(world, is_strict=True)
        # To b, after some steps to c, and after as many again back to a.
        for steps in range(0, max(wanted) + 3, 4):
            for revision in "bca":
                world.begin(revision)
                for _ in range(steps):
                    world.turn()
                    judge.step()
            world.finish()


def test_a_step_is_computed_from_what_is_seen_and_from_nothing_else():
    world = World(Pair(5, 2), strategy(1, 0))
    world.begin("b")
    for _ in range(12):
        world.turn()
        situation = world.situation()
        step = next_step(situation)
        assert next_step(situation) == step
        for write in world.writes(step):
            world.write(*write)
            # Killed after any write, it goes on to the same end.
        assert next_step(world.situation()).retired.keys() >= step.retired.keys() & world.live.keys()
