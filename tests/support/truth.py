"""What a status has to say, worked out from the objects of an API server alone and by other means than the operator's.

Used on the simulated API and on the real one. A condition's reason and words are left to other tests: here it is the
status of each, the counts, the revisions, and since when.
"""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from math import ceil, floor
from typing import Any

Body = dict[str, Any]

ROLES = ("prefill", "decode", "router")
NAME, ROLE, REVISION = (f"dcpdisagg.io/{word}" for word in ("name", "role", "revision"))
COMPONENT_CONDITIONS = {"prefill": "PrefillReady", "decode": "DecodeReady", "router": "RouterReady"}


def expected_status(owner: Body, target: str, everything: Iterable[Body]) -> dict[str, Any]:
    """Return what the status of `owner` must say of an accepted spec without autoscalers, whose revision is `target`.

    Conditions are given as a map from type to status; those that speak of other things are absent.
    """
    mine = [
        body
        for body in everything
        if body["metadata"]["namespace"] == owner["metadata"]["namespace"]
        and body["metadata"].get("labels", {}).get(NAME) == owner["metadata"]["name"]
    ]
    pods = [body for body in mine if body["kind"] == "Pod" and _is_there(body)]
    workloads = [
        body
        for body in mine
        if body["kind"] == "Deployment"
        and "deletionTimestamp" not in body["metadata"]
        and any(each["uid"] == owner["metadata"]["uid"] for each in body["metadata"].get("ownerReferences", []))
    ]
    spec = owner["spec"]
    wanted = {role: spec[role].get("replicas", 1) for role in ("prefill", "decode")}
    wanted["router"] = spec.get("router", {}).get("replicas", 1)
    born = sorted((body["metadata"]["creationTimestamp"], _label(body, REVISION)) for body in workloads)
    order = list(dict.fromkeys(revision for _, revision in born))
    # Without routers of its own a revision is reached through one that the user brings: so it is where the spec wants
    # none, and stays for an older revision whose Deployment of routers asks for none.
    none_asked = {_label(body, REVISION) for body in workloads if _is_none(body)} - {target}
    routed = {
        each for each in order if wanted["router"] == 0 or each in none_asked or _ready(_of(pods, "router", each))
    }
    shares = {revision: _share(revision, wanted, pods) if revision in routed else Fraction(0) for revision in order}
    serving = [revision for revision in order if revision in routed and _serves(revision, pods)]
    others = {_label(body, REVISION) for body in (*pods, *workloads)} - {target}
    paused = spec.get("paused", False)
    # Of a pause before anything of the revision is made, what is said is about the one that runs.
    shown = target
    if paused and order and target not in order:
        shown = serving[-1] if serving else order[-1]
    has_engines = 0 not in (wanted["prefill"], wanted["decode"])
    complete = {role: _is_complete(role, shown, wanted[role], pods, workloads) for role in ROLES}
    ready = all(complete.values()) and not others and shown == target and has_engines
    held = paused and (bool(others) or shown != target or not order)
    capacity = min(Fraction(1), sum(shares.values(), Fraction(0)))
    conditions = {
        "Ready": ready,
        "Available": capacity > 0 and capacity >= _floor(spec, wanted),
        # Nothing moves where a role has no engines, and where a pause holds what would.
        "Progressing": not ready and not held and not (paused and all(complete.values())) and has_engines,
        **{COMPONENT_CONDITIONS[role]: complete[role] and (wanted[role] > 0 or role == "router") for role in ROLES},
    }
    return {
        "observedGeneration": owner["metadata"]["generation"],
        "currentRevision": target if target in serving else (serving[-1] if serving else None),
        "updateRevision": target,
        **{role: _counts(role, target, pods) for role in ROLES},
        "conditions": {kind: str(value) for kind, value in conditions.items()},
        "revisions": [
            {
                "revision": revision,
                "share": f"{floor(shares[revision] * 100)}%",
                **{role: len(_ready(_of(pods, role, revision))) for role in ROLES},
            }
            for revision in order
        ]
        if others
        else None,
    }


def said_status(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a status says, in the form of `expected_status`."""
    kinds = ("Ready", "Available", "Progressing", *COMPONENT_CONDITIONS.values())
    said = {entry["type"]: entry["status"] for entry in status.get("conditions", [])}
    return {
        "observedGeneration": status.get("observedGeneration"),
        "currentRevision": status.get("currentRevision"),
        "updateRevision": status.get("updateRevision"),
        **{role: status.get(role) for role in ROLES},
        "conditions": {kind: said.get(kind) for kind in kinds},
        "revisions": status["rollout"].get("revisions") if "rollout" in status else None,
    }


def _counts(role: str, target: str, pods: list[Body]) -> dict[str, int]:
    mine = [pod for pod in pods if _label(pod, ROLE) == role]
    return {
        "replicas": len(mine),
        "readyReplicas": len(_ready(mine)),
        "updatedReplicas": len([pod for pod in mine if _label(pod, REVISION) == target]),
        "scheduledReplicas": len(
            [pod for pod in mine if pod["status"]["phase"] == "Running" or _condition(pod, "PodScheduled") == "True"]
        ),
    }


def _is_none(workload: Body) -> bool:
    return _label(workload, ROLE) == "router" and workload["spec"]["replicas"] == 0


def _share(revision: str, wanted: dict[str, int], pods: list[Body]) -> Fraction:
    if 0 in (wanted["prefill"], wanted["decode"]):
        return Fraction(0)
    parts = [Fraction(len(_ready(_of(pods, role, revision))), wanted[role]) for role in ("prefill", "decode")]
    return min(Fraction(1), *parts)


def _floor(spec: Body, wanted: dict[str, int]) -> Fraction:
    strategy = spec.get("rolloutStrategy", {})
    result = Fraction(1)
    for role in ("prefill", "decode"):
        count = wanted[role]
        if count == 0:
            return Fraction(0)
        surge = _number(strategy.get("maxSurge", 1), count, ceil)
        missing = _number(strategy.get("maxUnavailable", 0), count, floor)
        if surge == missing == 0:
            missing = 1
        result = min(result, 1 - Fraction(min(missing, count), count))
    return result


def _number(stated: int | str, count: int, rounding: Any) -> int:
    return stated if isinstance(stated, int) else rounding(Fraction(int(stated[:-1]) * count, 100))


def _serves(revision: str, pods: list[Body]) -> bool:
    return all(_ready(_of(pods, role, revision)) for role in ("prefill", "decode"))


def _is_complete(role: str, revision: str, wanted: int, pods: list[Body], workloads: list[Body]) -> bool:
    """Whether as many pods as wanted exist, all ready, and Kubernetes has acted on the newest workload."""
    found = [body for body in workloads if (_label(body, ROLE), _label(body, REVISION)) == (role, revision)]
    mine = _of(pods, role, revision)
    if role == "router" and wanted == 0:
        return not mine
    if len(found) != 1 or found[0]["spec"]["replicas"] != wanted:
        return False
    seen = found[0].get("status", {})
    is_acted_on = seen.get("observedGeneration", 0) >= found[0]["metadata"]["generation"]
    is_new = seen.get("updatedReplicas", 0) >= wanted
    return is_acted_on and is_new and len(mine) == len(_ready(mine)) == wanted


def _of(pods: list[Body], role: str, revision: str) -> list[Body]:
    return [pod for pod in pods if (_label(pod, ROLE), _label(pod, REVISION)) == (role, revision)]


def _ready(pods: list[Body]) -> list[Body]:
    return [pod for pod in pods if _condition(pod, "Ready") == "True"]


def _is_there(pod: Body) -> bool:
    return "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] not in ("Succeeded", "Failed")


def _condition(pod: Body, kind: str) -> str | None:
    found = [entry["status"] for entry in pod["status"].get("conditions", []) if entry["type"] == kind]
    return found[0] if found else None


def _label(body: Body, key: str) -> str:
    return body["metadata"].get("labels", {}).get(key, "")
