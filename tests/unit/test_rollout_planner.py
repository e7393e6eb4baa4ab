"""The steps of a rollout, in numbers: what goes, what comes, and what is said of it."""

import pytest

from dcp_operator.api.spec import RolloutStrategy
from dcp_operator.rollout.planner import next_step
from dcp_operator.rollout.shares import Pair, bounds_of
from dcp_operator.rollout.situation import Counts, Engines, Revision, Situation, Step

TWO = RolloutStrategy(max_surge=1, max_unavailable=0)


def revision(
    name: str, engines: tuple[int, int], ready: tuple[int, int] | None = None, routers: int | None = 1, **more: int
) -> Revision:
    """Return a revision; its router is ready when both roles have a ready engine."""
    up = engines if ready is None else ready
    roles = [Engines(count, each, **more) for count, each in zip(engines, up, strict=True)]
    return Revision(name, *roles, routers=routers, ready_routers=int(min(up) > 0 and bool(routers)))


def step(
    *revisions: Revision,
    wanted: tuple[int, int] = (4, 4),
    strategy: RolloutStrategy = TWO,
    target: str = "b",
    routers: int = 1,
    paused: bool = False,
) -> Step:
    return next_step(Situation(bounds_of(Pair(*wanted), strategy), routers, target, revisions, paused))


def engines(found: Step) -> dict[str, tuple[int, int]]:
    return {name: tuple(counts.engines) for name, counts in found.replicas.items()}


@pytest.mark.parametrize(
    ("wanted", "surge", "unavailable", "expected"),
    [
        ((4, 4), 1, 0, ((1, 1), (0, 0))),
        ((4, 4), "25%", "25%", ((1, 1), (1, 1))),
        ((5, 2), "10%", 0, ((1, 1), (0, 0))),
        ((5, 2), 0, "25%", ((0, 0), (1, 1))),
        ((8, 2), "50%", "50%", ((4, 1), (4, 1))),
        ((0, 3), 0, "10%", ((0, 0), (0, 1))),
        ((2, 2), 0, 5, ((0, 0), (2, 2))),
    ],
    ids=[
        "numbers",
        "percentages",
        "a percentage of the surge is rounded up",
        "one of what may be missing is rounded down, and both 0 are one missing",
        "each role by its own number",
        "of no engines none may be missing",
        "no more may be missing than there are",
    ],
)
def test_bounds_are_counted_as_deployments_count_them(wanted, surge, unavailable, expected):
    bounds = bounds_of(Pair(*wanted), RolloutStrategy(max_surge=surge, max_unavailable=unavailable))
    assert (bounds.surge, bounds.unavailable) == expected


class TestTurns:
    def test_a_first_revision_is_made_at_once(self):
        assert engines(step(wanted=(5, 2))) == {"b": (5, 2)}

    def test_new_engines_come_before_old_ones_go(self):
        assert engines(step(revision("a", (4, 4)))) == {"a": (4, 4), "b": (1, 1)}
        assert engines(step(revision("a", (4, 4)), revision("b", (1, 1), (0, 0)))) == {"a": (4, 4), "b": (1, 1)}
        assert engines(step(revision("a", (4, 4)), revision("b", (1, 1)))) == {"a": (3, 3), "b": (1, 1)}
        assert engines(step(revision("a", (3, 3)), revision("b", (1, 1)))) == {"a": (3, 3), "b": (2, 2)}

    def test_ready_engines_that_are_to_go_already_count_no_more(self):
        new = Revision("b", Engines(2, ready=2), Engines(2, ready=2), routers=1, ready_routers=1)
        # Of the old ones two were asked to go and are still ready.
        old = Revision("a", Engines(2, ready=4), Engines(2, ready=4), routers=1, ready_routers=1)
        assert engines(step(old, new)) == {"a": (2, 2), "b": (3, 3)}
        ahead = Revision("b", Engines(1, ready=3), Engines(1, ready=3), routers=1, ready_routers=1)
        assert engines(step(revision("a", (3, 3)), ahead))["a"] == (3, 3)

    def test_one_ready_role_alone_takes_over_nothing(self):
        found = step(revision("a", (4, 4)), revision("b", (1, 1), (1, 0)))
        assert engines(found) == {"a": (4, 4), "b": (1, 1)}

    def test_engines_without_a_ready_router_take_over_nothing(self):
        new = Revision("b", Engines(1, 1), Engines(1, 1), routers=1, ready_routers=0)
        assert engines(step(revision("a", (4, 4)), new)) == {"a": (4, 4), "b": (1, 1)}
        # With a router that is not this object's nobody waits for one.
        without = Revision("b", Engines(1, 1), Engines(1, 1), routers=0)
        assert engines(step(revision("a", (4, 4), routers=0), without, routers=0)) == {"a": (3, 3), "b": (1, 1)}

    def test_roles_of_unequal_size_move_in_matched_shares(self):
        assert engines(step(revision("a", (5, 2)), wanted=(5, 2))) == {"a": (5, 2), "b": (1, 1)}
        # One of five prefill engines is ready: decode's one engine could do more, and 4/5 are left to the old ones.
        found = step(revision("a", (5, 2)), revision("b", (1, 1)), wanted=(5, 2))
        assert engines(found) == {"a": (4, 2), "b": (1, 1)}

    def test_what_may_be_unavailable_goes_first(self):
        may = RolloutStrategy(max_surge=0, max_unavailable=1)
        assert engines(step(revision("a", (4, 4)), strategy=may)) == {"a": (3, 3), "b": (0, 0)}
        assert engines(step(revision("a", (3, 3)), revision("b", (0, 0)), strategy=may)) == {"a": (3, 3), "b": (1, 1)}

    def test_a_stated_skew_keeps_a_role_near_the_other_ones_ready_engines(self):
        skewed = RolloutStrategy(max_surge=4, max_unavailable=0, max_skew=1)
        assert engines(step(revision("a", (4, 4)), strategy=skewed)) == {"a": (4, 4), "b": (1, 1)}
        new = revision("b", (1, 1), (1, 1))
        assert engines(step(revision("a", (4, 4)), new, strategy=skewed))["b"] == (2, 2)
        assert engines(step(revision("a", (4, 4)), revision("b", (2, 2), (2, 1)), strategy=skewed))["b"] == (2, 2)

    def test_the_old_revision_goes_when_the_new_one_serves_all_of_it(self):
        found = step(revision("a", (1, 1)), revision("b", (4, 4)))
        assert found.retired == {"a": "replaced by revision b"}
        assert engines(found) == {"b": (4, 4)}

    def test_both_roles_of_an_old_revision_go_together(self):
        found = step(revision("a", (1, 4), (1, 4)), revision("b", (4, 4), (4, 4)))
        assert set(found.retired) == {"a"}

    def test_of_a_role_that_nobody_wants_nothing_stays(self):
        found = step(revision("a", (2, 2)), revision("b", (1, 1)), wanted=(2, 0))
        assert set(found.retired) == {"a"}
        assert engines(found) == {"b": (1, 0)}

    def test_routers_follow_the_shares_and_each_revision_has_one(self):
        found = step(revision("a", (4, 4), routers=4), revision("b", (1, 1), routers=1), routers=4)
        assert {name: counts.router for name, counts in found.replicas.items()} == {"a": 3, "b": 1}
        found = step(revision("a", (4, 4)), revision("b", (1, 1)), routers=1)
        assert {name: counts.router for name, counts in found.replicas.items()} == {"a": 1, "b": 1}


class TestUsersRouter:
    """Old revisions that a router of the user's own serves, beside a target with routers of ours."""

    def test_it_gets_no_router_of_ours_and_its_engines_go_on_counting(self):
        old = revision("a", (4, 4), routers=0)
        first = step(old, routers=2)
        assert {name: counts.router for name, counts in first.replicas.items()} == {"a": 0, "b": 1}
        assert engines(first) == {"a": (4, 4), "b": (1, 1)}
        assert engines(step(old, revision("b", (1, 1)), routers=2)) == {"a": (3, 3), "b": (1, 1)}

    def test_nor_while_it_is_paused_or_alone(self):
        held = step(revision("a", (4, 4), routers=0), routers=1, paused=True)
        assert {name: counts.router for name, counts in held.replicas.items()} == {"a": 0}

    def test_it_goes_when_the_new_one_serves_all(self):
        found = step(revision("a", (1, 1), routers=0), revision("b", (4, 4)))
        assert list(found.retired) == ["a"]

    def test_the_target_gets_its_routers_and_serves_behind_them_alone(self):
        found = step(revision("b", (4, 4), routers=0), routers=2)
        assert found.replicas["b"].router == 2
        beside = step(revision("a", (4, 4)), revision("b", (4, 4), routers=0))
        assert engines(beside)["a"] == (4, 4)


class TestSeveral:
    def test_of_two_old_ones_the_newest_goes_first(self):
        found = step(revision("a", (4, 4)), revision("b", (1, 1)), target="c")
        assert set(found.retired) == {"b"}
        assert engines(found)["a"] == (4, 4)

    def test_an_old_one_that_never_got_ready_goes_first_of_all(self):
        found = step(revision("a", (1, 1), (0, 0)), revision("b", (4, 4)), target="c")
        assert set(found.retired) == {"a"}

    def test_a_third_one_begins_when_rounding_leaves_room_for_it(self):
        old = [revision("a", (3, 2)), revision("b", (2, 1))]
        found = step(*old, wanted=(5, 2), target="c")
        assert engines(found) == {"a": (4, 2), "b": (2, 1)}
        assert found.waits_for is not None
        assert "revision c begins when no more than 1 other serves: a and b serve" in found.waits_for
        wide = RolloutStrategy(max_surge=2, max_unavailable=0)
        assert engines(step(*old, wanted=(5, 2), target="c", strategy=wide))["c"] == (2, 1)

    def test_where_no_other_way_leads_out_the_surge_is_larger_by_what_rounding_takes(self):
        # Somebody lowered maxSurge while three revisions served: each has to keep a decode engine, and none is left.
        found = step(revision("a", (2, 1)), revision("b", (1, 1)), revision("c", (3, 1)), wanted=(5, 2), target="c")
        assert engines(found)["c"] == (4, 2)


class TestTrouble:
    def test_a_revision_that_alone_could_serve_again_is_kept(self):
        found = step(revision("a", (2, 2), (0, 0)), revision("b", (1, 1), (0, 0)), wanted=(2, 2))
        assert engines(found)["a"] == (2, 2)
        found = step(revision("a", (2, 2), (0, 0), stale=2), revision("b", (1, 1), (0, 0)), wanted=(2, 2))
        assert engines(found)["a"] == (2, 2)

    def test_while_no_router_is_ready_anywhere_the_engines_that_a_floor_needs_are_told_by_their_own_readiness(self):
        old = [Revision(name, Engines(n, n), Engines(n, n), routers=1) for name, n in (("a", 4), ("b", 1))]
        found = step(*old, target="c")
        assert set(found.retired) == {"b"}
        assert engines(found)["a"] == (4, 4)

    def test_its_dead_engines_go_when_they_are_in_the_way_of_the_new_ones(self):
        new = revision("b", (1, 1), (0, 0), unschedulable=1)
        found = step(revision("a", (2, 2), (0, 0), stale=2), new, wanted=(2, 2))
        assert set(found.retired) == {"a"}
        found = step(revision("a", (2, 2), (1, 1), stale=1), new, wanted=(2, 2))
        assert engines(found)["a"] == (1, 1)

    def test_one_whose_routers_were_deleted_goes(self):
        found = step(revision("a", (4, 4), routers=None), revision("b", (1, 1), (0, 0)))
        assert found.retired == {"a": "its routers are gone"}

    def test_a_new_revision_without_a_ready_pair_gets_no_more_than_there_is_room_for(self):
        found = step(revision("a", (2, 2)), revision("b", (1, 1), (0, 0)), wanted=(6, 6))
        assert engines(found) == {"a": (6, 6), "b": (1, 1)}

    def test_when_the_new_revision_breaks_the_old_one_grows_again(self):
        found = step(revision("a", (3, 3)), revision("b", (1, 1), (0, 0)))
        assert engines(found) == {"a": (4, 4), "b": (1, 1)}


class TestPause:
    def test_nothing_is_begun_and_nothing_goes(self):
        assert engines(step(paused=True)) == {}
        assert engines(step(revision("a", (4, 4)), paused=True)) == {"a": (4, 4)}
        middle = [revision("a", (4, 4)), revision("b", (1, 1))]
        assert engines(step(*middle, paused=True)) == {"a": (4, 4), "b": (1, 1)}
        done = [revision("a", (1, 1)), revision("b", (4, 4))]
        assert step(*done, paused=True).retired == {}

    @pytest.mark.parametrize(("wanted", "expected"), [((6, 6), (5, 5)), ((2, 2), (2, 2)), ((3, 0), (3, 0))])
    def test_edits_of_replicas_go_to_the_revision_that_serves_most(self, wanted, expected):
        middle = [revision("a", (3, 3)), revision("b", (1, 1))]
        assert engines(step(*middle, wanted=wanted, paused=True))["a"] == expected

    def test_one_revision_alone_is_scaled_as_ever(self):
        assert engines(step(revision("b", (4, 4)), wanted=(3, 5), paused=True)) == {"b": (3, 5)}

    @pytest.mark.parametrize(
        ("revisions", "words"),
        [
            ((), "paused before revision b was begun, so nothing runs"),
            ((revision("a", (4, 4)),), "paused: revision b isn't begun, a stays"),
            ((revision("a", (4, 4)), revision("b", (1, 1))), "revision b stays at 1 prefill and 1 decode engines"),
        ],
    )
    def test_it_is_said_what_the_pause_holds(self, revisions, words):
        said = step(*revisions, paused=True).waits_for
        assert said is not None
        assert words in said
        assert "set spec.paused to false" in said

    def test_nothing_is_said_where_it_holds_nothing(self):
        assert step(revision("b", (4, 4)), paused=True).waits_for is None


class TestWords:
    def test_engines_that_have_to_become_ready_are_counted(self):
        said = step(revision("a", (4, 4)), revision("b", (1, 1), (0, 1))).waits_for
        assert said == "1 prefill engine of revision b has to become ready before more of revision a may go"

    def test_without_a_spare_accelerator_it_says_what_to_set(self):
        new = revision("b", (1, 1), (0, 0), unschedulable=1)
        said = step(revision("a", (1, 1)), new, wanted=(1, 1)).waits_for
        assert said == (
            "no node can take 1 prefill and 1 decode engines of revision b, and spec.rolloutStrategy.maxUnavailable 0 "
            "keeps revision a until they run: add accelerators, or set maxUnavailable to 1, which lets old engines go "
            "first"
        )

    def test_with_that_set_the_old_engines_go_first(self):
        may = RolloutStrategy(max_surge=1, max_unavailable=1)
        new = revision("b", (1, 1), (0, 0), unschedulable=1)
        assert set(step(revision("a", (1, 1)), new, wanted=(1, 1), strategy=may).retired) == {"a"}

    def test_a_router_that_is_not_ready_is_named(self):
        new = Revision("b", Engines(4, 4), Engines(4, 4), routers=1, ready_routers=0)
        said = step(revision("a", (1, 1)), new).waits_for
        assert said == "a router of revision b has to become ready: its engines are"

    def test_at_the_end_it_is_said_what_goes(self):
        said = step(revision("a", (1, 1)), revision("b", (4, 4))).waits_for
        assert said == "revision a goes: its routers end their requests first, then its engines go"

    def test_nothing_is_said_when_nothing_is_left_to_do(self):
        assert step(revision("b", (4, 4))).waits_for is None


def test_counts_are_asked_for_by_the_names_of_components():
    counts = Counts(1, 2, 3)
    assert [counts.of(component) for component in ("prefill", "decode", "router")] == [1, 2, 3]
