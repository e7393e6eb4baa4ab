"""The next step of a rollout: pure, and from what is observed alone, so that no step needs to know of an earlier one.

R_r are the engines wanted of role r, s_r and u_r how many may be above or missing (maxSurge, maxUnavailable). Every
revision has a serving share: of its ready engines, in matched pairs, and zero without a ready router of its own, unless
the router is the user's.

The floor is F = min over r of (R_r - u_r) / R_r.

An old revision shrinks to the engines of the share that the others leave to be served, F - sum of their serving shares;
the newest goes first. Ready engines are the last that Kubernetes removes, so the serving share is at least F after a
step, or what it was before. Engines that have not been ready for long aren't counted on while anything serves.

The target grows to the largest share whose engines keep the sum over all revisions within R_r + s_r, and within
ceil(R_r * ready_o / R_o) + maxSkew_r (o: the other role) where that is stated. It never shrinks, but to R_r.

It ends. With one old revision at F - c, where c is the target's ready share, the target's next engine of a role fits:
floor(c * R_r) + 1 + ceil((F - c) * R_r) <= R_r + s_r where s_r or u_r is at least 1, since F * R_r <= R_r - u_r. Each
old revision more adds up to one engine by rounding, unless both roles want as many. So beside more than `Bounds.room`
old ones that serve a target isn't begun: the largest of them takes over from the others first. If it was begun already
(somebody lowered maxSurge meanwhile), the surge is as much larger as rounding needs.

As long as the target has not one ready pair, the largest old revision is held at the floor: it follows edits of
replicas, and it grows again if the target was ready once and broke.
"""

from fractions import Fraction

from dcp_operator.rollout.shares import NONE, Bounds, Pair, engines_of, largest_share, rounded, share_of
from dcp_operator.rollout.situation import Counts, Revision, Situation, Step
from dcp_operator.rollout.words import explain

_EMPTY = Pair(0, 0)


def next_step(situation: Situation) -> Step:
    """Return what the workloads should be next."""
    engines = _paused(situation) if situation.is_paused else _moved(situation)
    retired = {
        revision.name: _why(situation, revision)
        for revision in situation.old
        if engines[revision.name] == _EMPTY and not situation.is_paused
    }
    staying = {name: counts for name, counts in engines.items() if name not in retired}
    replicas = {name: Counts(*counts, router=_routers(situation, name, staying)) for name, counts in staying.items()}
    return Step(replicas, retired, explain(situation, replicas, retired))


def _moved(situation: Situation) -> dict[str, Pair]:
    """Return the engines of each revision after a step."""
    is_crowded = _is_crowded(situation)
    after = _shrunk(situation, is_crowded=is_crowded)
    new = situation.new or Revision(situation.target)
    target = _least(new.replicas, situation.bounds.wanted) if is_crowded else _grown(situation, new, after)
    main = _main(situation)
    # Room that the old one's own dead engines take up is room that a target without any needs.
    may_hold = main is not None and after[main.name] != _EMPTY and not (new.unschedulable and main.stale)
    if main is not None and may_hold and (is_crowded or situation.paired(new) == 0):
        after[main.name] = _held(situation, main, target, after[main.name], is_crowded=is_crowded)
    # A target whose turn has not come has nothing made of it.
    return after if is_crowded and situation.new is None else {**after, situation.target: target}


def _shrunk(situation: Situation, *, is_crowded: bool) -> dict[str, Pair]:
    """Return the engines that the old revisions need to have."""
    bounds, gives = situation.bounds, _gives(situation)
    hope = _hope(situation, gives)
    result: dict[str, Pair] = {}
    # Newest first; before all others those that have no ready pair, last the one that takes over from the others.
    last = _main(situation) if is_crowded else None
    newest_first = situation.old[::-1]
    for revision in sorted(newest_first, key=lambda each: (each is last, situation.paired(each) > 0)):
        others = sum((share for name, share in gives.items() if name != revision.name), NONE)
        has = share_of(revision.kept(without_stale=revision is not hope), bounds.wanted)
        share = min(max(bounds.floor - others, NONE), has) if situation.can_serve(revision) else NONE
        gives[revision.name] = min(gives[revision.name], share)
        result[revision.name] = engines_of(share, bounds.wanted) if share else _EMPTY
    return result


def _gives(situation: Situation) -> dict[str, Fraction]:
    """Return what each revision serves; where none does, because no router is ready, what it would with one."""
    serving = {revision.name: situation.serving(revision) for revision in situation.revisions}
    if any(serving.values()):
        return serving
    return {each.name: situation.paired(each) if situation.can_serve(each) else NONE for each in situation.revisions}


def _hope(situation: Situation, gives: dict[str, Fraction]) -> Revision | None:
    """Return the old revision whose dead engines are waited for: the largest, while nothing else could serve.

    Not where the target has engines that no node can take: those of the old one may be what is in their way.
    """
    if any(gives.values()) or (situation.new is not None and situation.new.unschedulable):
        return None
    able = [revision for revision in situation.old if situation.can_serve(revision)]
    return max(able, key=lambda each: share_of(each.replicas, situation.bounds.wanted), default=None)


def _is_crowded(situation: Situation) -> bool:
    """Whether there are more old revisions than the target can change places with, and it has not begun to."""
    bounds, new = situation.bounds, situation.new
    old = sum(revision.replicas != _EMPTY and situation.can_serve(revision) for revision in situation.old)
    has_begun = new is not None and new.replicas != _EMPTY
    return old > bounds.room and not bounds.is_even and not has_begun and bounds.floor > 0


def _grown(situation: Situation, new: Revision, after: dict[str, Pair]) -> Pair:
    """Return the engines that the target should have."""
    bounds = situation.bounds
    others = [revision.replicas for revision in situation.old]
    limits = _room(bounds, others, count=sum(engines != _EMPTY for engines in after.values()))
    if any(engines != _EMPTY for engines in others):
        limits = _least(limits, _skewed(bounds, new))
    if situation.paired(new) == 0 and any(situation.serving(revision) for revision in situation.old):
        # Of what may be broken, no more than there is room for beside what serves: edits of replicas go to the latter.
        proven = Pair(*(s + u for s, u in zip(bounds.surge, bounds.unavailable, strict=True)))
        limits = _least(limits, proven)
    wanted = engines_of(largest_share(limits, bounds.wanted), bounds.wanted)
    return _least(_most(new.replicas, wanted), bounds.wanted)


def _room(bounds: Bounds, others: list[Pair], *, count: int) -> Pair:
    """Return how many engines of each role fit beside those of `others`, of which `count` go on serving."""
    slack = zip(bounds.surge, bounds.unavailable, strict=True)
    surge = bounds.surge if bounds.is_even else Pair(*(max(s, count - u) for s, u in slack))
    taken = Pair(sum(pair.prefill for pair in others), sum(pair.decode for pair in others))
    return Pair(*(r + s - t for r, s, t in zip(bounds.wanted, surge, taken, strict=True)))


def _skewed(bounds: Bounds, new: Revision) -> Pair:
    """Return the most engines that maxSkew allows of each role: what the ready ones of the other pair with, and it."""
    if bounds.skew is None or 0 in bounds.wanted:
        return bounds.wanted
    prefill, decode = bounds.wanted
    return Pair(
        -(-prefill * new.decode.counted // decode) + bounds.skew.prefill,
        -(-decode * new.prefill.counted // prefill) + bounds.skew.decode,
    )


def _main(situation: Situation) -> Revision | None:
    """Return the old revision that serves most, the oldest of equals; None where none does."""
    gives = _gives(situation)
    serving = [revision for revision in situation.old if gives[revision.name]]
    return max(serving, key=lambda each: gives[each.name], default=None)


def _held(situation: Situation, main: Revision, target: Pair, shrunk: Pair, *, is_crowded: bool) -> Pair:
    """Return the engines of the old revision that has to keep up the floor, or to take over from the other old ones."""
    bounds = situation.bounds
    others = [revision for revision in situation.old if revision is not main]
    limits = _room(bounds, [target, *(revision.replicas for revision in others)], count=0)
    gives = _gives(situation)
    share = bounds.floor
    if not is_crowded:
        share -= sum((gives[revision.name] for revision in others), NONE)
    share = min(max(share, NONE), largest_share(limits, bounds.wanted))
    return _most(shrunk, engines_of(share, bounds.wanted))


def _paused(situation: Situation) -> dict[str, Pair]:
    """Return the engines of each revision while nothing moves: edits of replicas go to the one that serves most."""
    bounds = situation.bounds
    result = {
        revision.name: Pair(*(have if want else 0 for have, want in zip(revision.replicas, bounds.wanted, strict=True)))
        for revision in situation.revisions
    }
    if not result:
        return result
    running = [each for each in situation.revisions if each.replicas != _EMPTY]
    main = max(
        # Where nothing runs, because nothing was wanted, it is the target that comes back.
        running or [situation.new or situation.revisions[-1]],
        key=lambda each: (situation.serving(each), situation.paired(each), share_of(each.replicas, bounds.wanted)),
    )
    others = [engines for name, engines in result.items() if name != main.name and engines != _EMPTY]
    taken = Pair(sum(pair.prefill for pair in others), sum(pair.decode for pair in others))
    surge = bounds.surge if others else _EMPTY
    result[main.name] = Pair(
        *(
            max(min(max(have, want - t), want + s - t), min(1, want))
            for have, want, s, t in zip(result[main.name], bounds.wanted, surge, taken, strict=True)
        )
    )
    return result


def _routers(situation: Situation, name: str, staying: dict[str, Pair]) -> int:
    """Return the routers of a revision: as many of those wanted as its share of the engines, and at least one.

    None for an older revision that the user's own router serves: ours may not suit its connector.
    """
    if any(revision.name == name and situation.users_router(revision) for revision in situation.revisions):
        return 0
    with_engines = [each for each, engines in staying.items() if engines != _EMPTY or each == situation.target]
    if situation.routers == 0 or with_engines == [name]:
        return situation.routers
    return max(1, rounded(share_of(staying[name], situation.bounds.wanted), situation.routers))


def _why(situation: Situation, revision: Revision) -> str:
    new = situation.new
    if new is not None and situation.serving(new) >= situation.bounds.floor:
        return f"replaced by revision {situation.target}"
    if not situation.can_serve(revision):
        return "its routers are gone"
    if situation.paired(revision) == 0:
        return "does not serve, and another revision does"
    return "other revisions serve all that has to be served"


def _least(one: Pair, other: Pair) -> Pair:
    return Pair(*map(min, one, other))


def _most(one: Pair, other: Pair) -> Pair:
    return Pair(*map(max, one, other))
