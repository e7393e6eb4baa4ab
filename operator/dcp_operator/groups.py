"""Pods that are one engine together: the groups of a LeaderWorkerSet.

Everything else in the operator counts engines. So what is observed of a group is put in the form of one pod, its
leader's: Ready only while all pods of the group are, and with the others kept beside it for those who ask why not.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, cast

from dcp_operator import names
from dcp_operator.observed import Body, entries, section

#: Where a leader's body, as it is observed, keeps the other pods of its group.
WORKERS: Final = "groupWorkers"
#: Reason of the Ready condition of a leader that is ready itself.
NOT_TOGETHER: Final = "GroupNotReady"
#: Digits of the largest group size that is believed: Kubernetes counts in 32 bits.
_SIZE_DIGITS: Final = 10


class GroupKey(NamedTuple):
    """One group in its namespace: the LeaderWorkerSet's name, and the group's number there."""

    set_name: str
    number: str


def group_of(pod: Body) -> GroupKey | None:
    """Return the group that a pod belongs to, None for a pod that is no part of one."""
    labels = section(pod, "metadata", "labels")
    name, index = labels.get(names.LABEL_GROUP_SET), labels.get(names.LABEL_GROUP_INDEX)
    return GroupKey(name, index) if name and index else None


def is_leader(pod: Body) -> bool:
    """Whether a pod leads its group."""
    return section(pod, "metadata", "labels").get(names.LABEL_WORKER_INDEX) == "0"


def group_size(leader: Body) -> int:
    """Return how many pods a leader's group has when it is complete, itself included; 1 where no number says so."""
    size = str(section(leader, "metadata", "annotations").get(names.ANNOTATION_GROUP_SIZE, "1"))
    return int(size) if size.isdecimal() and len(size) <= _SIZE_DIGITS else 1


def workers_of(pod: Body) -> tuple[Body, ...]:
    """Return the other pods of the group of a leader as it is observed; none for any other pod."""
    return cast("tuple[Body, ...]", pod.get(WORKERS) or ())


def group_trouble(pod: Body) -> str | None:
    """Return why an engine is not ready although its leader is, None where that is not so."""
    for condition in entries(pod, "status", "conditions"):
        if condition.get("type") == "Ready" and condition.get("reason") == NOT_TOGETHER:
            return condition.get("message")
    return None


def as_engines(pods: Iterable[Body]) -> tuple[Body, ...]:
    """Return the pods with each group as one: its leader, Ready only while every pod of the group is.

    Other pods are returned as they are. Workers without a leader are left out: Kubernetes is removing them.
    """
    kept: list[Body] = []
    leaders: list[tuple[GroupKey, Body]] = []
    workers: dict[GroupKey, list[Body]] = {}
    for pod in pods:
        key = group_of(pod)
        if key is None:
            kept.append(pod)
        elif is_leader(pod):
            leaders.append((key, pod))
        else:
            workers.setdefault(key, []).append(pod)
    kept += [_together(leader, workers.get(key, [])) for key, leader in leaders]
    return tuple(kept)


def _together(leader: Body, workers: Sequence[Body]) -> Body:
    others = tuple(sorted(workers, key=lambda pod: pod["metadata"]["name"]))
    result = {**leader, WORKERS: others}
    missing = group_size(leader) - 1 - len(others)
    unready = [pod["metadata"]["name"] for pod in others if "deletionTimestamp" in pod["metadata"] or not _is_up(pod)]
    if missing <= 0 and not unready:
        return result
    words = f"{missing} of its pods don't exist" if missing > 0 else f"pod {unready[0]} of its group is not ready"
    conditions: list[Any] = [
        {**condition, "status": "False", "reason": NOT_TOGETHER, "message": words}
        if condition.get("type") == "Ready" and condition.get("status") == "True"
        else condition
        for condition in entries(leader, "status", "conditions")
    ]
    return {**result, "status": {**section(leader, "status"), "conditions": conditions}}


def _is_up(pod: Body) -> bool:
    return any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in entries(pod, "status", "conditions")
    )
