"""Which groups are made anew, and when: pure, from the pods, a small record in the workload, and the clock.

The ranks of an engine live and die together: one that was started again can't join those that run. So the whole group
is made anew, by deleting its leader, to which Kubernetes and LeaderWorkerSet add the rest. With k the number of times
that this was done before in a row,

    pause = min(baseDelay * 2**k, maxDelay)        from the moment when the failure was noticed

and k begins at 0 again once a group has lasted for twice the longest pause. The record is kept in an annotation of the
LeaderWorkerSet, so that a restart of the operator shortens no pause: what is noticed is written down at once, because
a pod that was replaced looks like any other soon after. And what is done is written down before it is done, so that it
is done again, and not counted again, if the deletion fails.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, cast

from dcp_operator import names
from dcp_operator.api.spec import RestartBackoff, Spec
from dcp_operator.groups import NOT_TOGETHER, group_of, group_size, workers_of
from dcp_operator.kinds import LEADER_WORKER_SET
from dcp_operator.observed import Body, Child, Observed, entries, section
from dcp_operator.settings import Role, role_spec
from dcp_operator.times import parsed, seconds_between

#: More than this doubles nothing any more.
_MAX_DOUBLINGS: Final = 20


@dataclass(frozen=True, slots=True)
class Noted:
    """What is remembered of one group."""

    #: How often it was made anew in a row, and when last (RFC 3339).
    times: int = 0
    last: str = ""
    #: uid of the leader whose group failed last.
    leader: str = ""
    #: While its pause lasts: when the failure was noticed, and what was seen.
    since: str = ""
    why: str = ""


#: By the group's number.
Record = Mapping[str, Noted]


@dataclass(frozen=True, slots=True)
class Restart:
    """A group to be made anew: its leader is deleted. `times` counts how often in a row, this time included."""

    index: str
    leader_name: str
    leader_uid: str
    times: int
    why: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What is due now, what is to be remembered, and in how many seconds something else is due."""

    restarts: tuple[Restart, ...]
    record: Record
    next_s: float | None


def due_restarts(observed: Observed, spec: Spec, now: str) -> list[tuple[Child, Decision]]:
    """Return what becomes of an object's groups, by their LeaderWorkerSet; without those that are left as they are.

    `spec` says how: groups of an earlier revision are treated like those of the present one. `now` is RFC 3339.
    """
    result: list[tuple[Child, Decision]] = []
    for child in observed.workloads():
        if child.ref.kind != LEADER_WORKER_SET.kind or child.is_deleting or child.component not in set(Role):
            continue
        stated = role_spec(spec, Role(child.component)).multinode
        if stated is not None and stated.restart_policy == "None":
            continue
        backoff = stated.restart_backoff if stated is not None else RestartBackoff()
        leaders = [pod for pod in observed.pods if (key := group_of(pod)) and key.set_name == child.ref.name]
        decision = decide(leaders, record_of(child), backoff, now)
        if decision.restarts or decision.next_s is not None or decision.record != record_of(child):
            result.append((child, decision))
    return result


def record_of(child: Child) -> Record:
    """Return what is remembered of a LeaderWorkerSet's groups."""
    return read(child.annotations.get(names.ANNOTATION_GROUP_RESTARTS))


def decide(leaders: Iterable[Body], record: Record, backoff: RestartBackoff, now: str) -> Decision:
    """Return what becomes of the groups with these leaders (`dcp_operator.groups.as_engines`), of one LeaderWorkerSet.

    `now` is RFC 3339 in UTC, as Kubernetes writes times. The record that is returned equals the one that was given
    unless there is news.
    """
    restarts: list[Restart] = []
    news: dict[str, Noted] = {}
    waits: list[float] = []
    for leader in sorted(leaders, key=lambda pod: pod["metadata"]["name"]):
        group = group_of(leader)
        if group is None or "deletionTimestamp" in leader["metadata"]:
            continue
        before = record.get(group.number, Noted())
        noted = _looked_at(leader, before, backoff, now)
        if noted.leader == leader["metadata"]["uid"]:
            left_s = pause_s(noted.times, backoff) - _since_s(noted.since, now) if noted.since else 0.0
            if left_s > 0:
                waits.append(left_s)
            else:
                if noted.since:
                    noted = Noted(noted.times + 1, now, noted.leader, why=noted.why)
                restarts.append(Restart(group.number, leader["metadata"]["name"], noted.leader, noted.times, noted.why))
        if noted != before:
            news[group.number] = noted
    return Decision(tuple(restarts), _updated(record, news, backoff, now), min(waits, default=None))


def _looked_at(leader: Body, noted: Noted, backoff: RestartBackoff, now: str) -> Noted:
    """Return what is known of a group after a look at it."""
    uid = leader["metadata"]["uid"]
    if noted.since and _since_s(noted.since, now) < 0:
        # The clock was set back; a pause must not last until it is that late again.
        noted = replace(noted, since=now)
    why = None if noted.leader == uid else failure(leader)
    if why is None:
        return noted
    times = 0 if _has_lasted(noted, backoff, now) else noted.times
    return Noted(times, noted.last, uid, now, why)


def _updated(record: Record, news: Record, backoff: RestartBackoff, now: str) -> Record:
    """Return the record with what is new; what is over is dropped then, because only then something is written."""
    if not news:
        return record
    kept = {index: noted for index, noted in record.items() if not _has_lasted(noted, backoff, now)}
    return {**kept, **news}


def _has_lasted(noted: Noted, backoff: RestartBackoff, now: str) -> bool:
    """Whether a group that was made anew has been well for so long that its earlier failures no longer count."""
    return not noted.since and _since_s(noted.last, now) > 2 * backoff.max_delay_seconds


def pause_s(times: int, backoff: RestartBackoff) -> float:
    """Return the pause before a group is made anew that was made anew so many times in a row, in seconds."""
    longest = max(backoff.base_delay_seconds, backoff.max_delay_seconds)
    return min(backoff.base_delay_seconds * 2.0 ** min(times, _MAX_DOUBLINGS), longest)


def failure(leader: Body) -> str | None:
    """Return what shows that a group can't go on as it is, None while nothing does. Of a leader as it is observed.

    A pod of it ended, the engine in it was started again, or a pod is gone or younger than the engine that it should be
    part of. A pod that is being removed still works, and so does a group of which not all pods exist yet. What a pod
    says of itself can be late, so that one that isn't seen to run is no sign.
    """
    workers = workers_of(leader)
    for pod in (leader, *workers):
        name = pod["metadata"]["name"]
        if section(pod, "status").get("phase") in ("Failed", "Succeeded"):
            return f"pod {name} ended for good"
        if _main(pod).get("restartCount", 0) > 0:
            return f"the engine in pod {name} was started again"
    missing = group_size(leader) - 1 - len(workers)
    if missing > 0 and _main(leader).get("started"):
        return f"{missing} of its pods are gone"
    ready_since = _ready_since(leader)
    for pod in workers:
        if ready_since is not None and pod["metadata"].get("creationTimestamp", "") > ready_since:
            return f"pod {pod['metadata']['name']} took the place of one that is gone"
    return None


def _main(pod: Body) -> Body:
    """Return the status of a pod's engine, empty where there is none yet."""
    none: Body = {}
    statuses = entries(pod, "status", "containerStatuses")
    return next((entry for entry in statuses if entry.get("name") == names.CONTAINER_MAIN), none)


def _ready_since(leader: Body) -> str | None:
    """Return since when the leader itself is ready, None if it is not."""
    for condition in entries(leader, "status", "conditions"):
        if condition.get("type") == "Ready" and (
            condition.get("status") == "True" or condition.get("reason") == NOT_TOGETHER
        ):
            return condition.get("lastTransitionTime")
    return None


def read(annotation: str | None) -> Record:
    """Return the record in an annotation; empty where there is none or somebody made nonsense of it."""
    try:
        value = json.loads(annotation or "{}")
        found = cast("dict[str, Any]", value)
        return {str(index): Noted(**fields) for index, fields in found.items() if _is_sound(fields)}
    except (ValueError, TypeError, AttributeError):
        return {}


def write(record: Record) -> str:
    """Return the annotation that holds a record, the same for the same record."""
    value = {index: {key: part for key, part in asdict(noted).items() if part} for index, noted in record.items()}
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _is_sound(fields: Any) -> bool:
    """Whether fields are those of `Noted`, with times that can be read."""
    noted = Noted(**fields)
    texts = (noted.last, noted.leader, noted.since, noted.why)
    if not isinstance(cast("Any", noted.times), int) or not all(isinstance(cast("Any", text), str) for text in texts):
        return False
    return all(not text or parsed(text) is not None for text in (noted.last, noted.since))


def _since_s(earlier: str, now: str) -> float:
    """Return the seconds since a time that was noted, without an end where that is not known."""
    seconds = seconds_between(earlier, now)
    return float("inf") if seconds is None else seconds
