"""What the next step of a rollout waits for, in words for the status."""

from collections.abc import Mapping

from dcp_operator.rollout.shares import Pair
from dcp_operator.rollout.situation import Counts, Revision, Situation

_NOTHING = Pair(0, 0)


def explain(situation: Situation, replicas: Mapping[str, Counts], retired: Mapping[str, str]) -> str | None:
    """Return what the next step waits for; None where nothing is left to do, or where it waits for nothing.

    `replicas` and `retired` are what the step decided on.
    """
    new = situation.new or Revision(situation.target)
    if situation.is_paused:
        return _paused(situation, new, replicas)
    if situation.target not in replicas:
        return _crowded(situation, replicas)
    if not situation.old:
        return None
    if new.unschedulable and new.ready != situation.bounds.wanted:
        return _no_room(situation, new)
    if situation.paired(new) > situation.serving(new):
        return f"a router of revision {new.name} has to become ready: its engines are"
    missing = Pair(*(asked - ready for asked, ready in zip(replicas[new.name].engines, new.ready, strict=True)))
    if any(count > 0 for count in missing):
        return f"{_of(missing)} of revision {new.name} {_verb(missing)} to become ready{_kept(replicas, retired)}"
    if len(retired) == len(situation.old):
        return f"revision {_names(retired)} goes: its routers end their requests first, then its engines go"
    return None


def _paused(situation: Situation, new: Revision, replicas: Mapping[str, Counts]) -> str | None:
    """Return what a pause holds back; None where there is nothing to hold."""
    resume = "set spec.paused to false to go on"
    if not situation.revisions:
        return f"paused before revision {new.name} was begun, so nothing runs; {resume}"
    running = _names(_running(situation, replicas))
    if situation.new is None:
        return f"paused: revision {new.name} isn't begun, {running or 'nothing'} stays; {resume}"
    if situation.old:
        beside = f" beside {running}" if running else ""
        return f"paused: revision {new.name} stays at {_of(replicas[new.name].engines)}{beside}; {resume}"
    return None


def _crowded(situation: Situation, replicas: Mapping[str, Counts]) -> str:
    """Return why the target isn't begun."""
    room = situation.bounds.room
    others = "1 other serves" if room == 1 else f"{room} others serve"
    running = _names(_running(situation, replicas))
    return (
        f"revision {situation.target} begins when no more than {others}: {running} serve, and one of them takes over "
        "first. A larger spec.rolloutStrategy.maxSurge lets it begin at once"
    )


def _no_room(situation: Situation, new: Revision) -> str:
    """Return what to do about engines that no node can take while old ones have to stay."""
    stuck = Pair(new.prefill.unschedulable, new.decode.unschedulable)
    words = f"no node can take {_of(stuck)} of revision {new.name}"
    stays = [revision for revision in situation.old if situation.serving(revision)]
    if not stays:
        return f"{words}, and no revision serves: free or add what the pods ask for"
    kept = f"revision {_names([revision.name for revision in stays])}"
    if any(situation.bounds.unavailable):
        return f"{words}, and maxUnavailable lets no more of {kept} go: free or add what the pods ask for"
    return (
        f"{words}, and spec.rolloutStrategy.maxUnavailable 0 keeps {kept} until they run: add accelerators, or set "
        "maxUnavailable to 1, which lets old engines go first"
    )


def _kept(replicas: Mapping[str, Counts], retired: Mapping[str, str]) -> str:
    """Return which revisions stay until then."""
    # The target is the last that was put in.
    stays = [name for name in list(replicas)[:-1] if name not in retired]
    return f" before more of revision {_names(stays)} may go" if stays else ""


def _running(situation: Situation, replicas: Mapping[str, Counts]) -> list[str]:
    """Return the old revisions that have engines after the step."""
    return [each.name for each in situation.old if each.name in replicas and replicas[each.name].engines != _NOTHING]


def _of(engines: Pair) -> str:
    """Return a number of engines of each role in words, without a role that has none."""
    parts = [f"{count} {role}" for role, count in engines._asdict().items() if count > 0]
    many = sum(count for count in engines if count > 0)
    return f"{' and '.join(parts) or 'no'} engine{'s' if many != 1 else ''}"


def _verb(engines: Pair) -> str:
    return "has" if sum(count for count in engines if count > 0) == 1 else "have"


def _names(revisions: Mapping[str, str] | list[str]) -> str:
    return " and ".join(revisions)
