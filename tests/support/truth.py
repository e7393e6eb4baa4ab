"""What a status has to say, worked out from the objects of an API server alone and by other means than the operator's.

Used on the simulated API and on the real one, for objects whose pods are made by Deployments. Of messages the facts in
them are judged (`tests.support.truth_words`), not the wording.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Any

Body = dict[str, Any]

ENGINES = ("prefill", "decode")
ROLES = (*ENGINES, "router")
NAME, ROLE, REVISION = (f"dcpdisagg.io/{word}" for word in ("name", "role", "revision"))
COMPONENT_CONDITIONS = {"prefill": "PrefillReady", "decode": "DecodeReady", "router": "RouterReady"}
CONDITIONS = ("Ready", "Available", "Progressing", *COMPONENT_CONDITIONS.values(), "ConfigCompatible")
SCALER = "DCPDisaggRoleScaler"
#: Of the reasons that a walk meets those that are reported first, and those that nothing but time is needed for.
_TROUBLES = ("InvalidSpec", "ScaledToZero", "PodsPending", "RollingOut")
_TAKES_TIME = ("PodsPending", "RollingOut")

#: Status and reason of a condition.
Said = tuple[str, str]


@dataclass(frozen=True)
class Checked:
    """The last check of the KV transfer that told something, as who made it knows."""

    revision: str
    engines: str
    at: str
    said: Said


@dataclass(frozen=True)
class Facts:
    """An object and what there is of it. Without a `target` its spec was refused."""

    owner: Body
    target: str | None
    pods: list[Body]
    workloads: list[Body]
    scalers: dict[str, Body]
    checked: Checked | None = None

    @property
    def spec(self) -> Body:
        return self.owner["spec"]

    @property
    def is_paused(self) -> bool:
        return self.spec.get("paused", False)

    @property
    def order(self) -> list[str]:
        """The revisions that have a workload, oldest first."""
        born = sorted((body["metadata"]["creationTimestamp"], label(body, REVISION)) for body in self.workloads)
        return list(dict.fromkeys(revision for _, revision in born))

    @property
    def others(self) -> set[str]:
        """Revisions beside the target that have a workload or a pod."""
        return {label(body, REVISION) for body in (*self.pods, *self.workloads)} - {self.target}

    @property
    def routed(self) -> set[str]:
        """Revisions that requests reach: by a ready router, or by the user's own."""
        return {each for each in self.order if self.has_users_router(each) or ready(self.of("router", each))}

    def has_users_router(self, revision: str | None) -> bool:
        """Whether the router of a revision is the user's own.

        That is so where the spec wants none, and stays for an older revision whose Deployment of routers asks for none.
        """
        if self.target is not None and self.wanted("router") == 0:
            return True
        body = self.workload("router", revision)
        return revision != self.target and body is not None and body["spec"]["replicas"] == 0

    @property
    def serving(self) -> list[str]:
        return [each for each in self.order if each in self.routed and all(ready(self.of(r, each)) for r in ENGINES)]

    @property
    def shown(self) -> str | None:
        """The revision that the component conditions speak of."""
        if self.order and (self.target is None or (self.is_paused and self.target not in self.order)):
            # Of what is refused, or paused before anything of it is made, what is said is about the one that runs.
            return self.serving[-1] if self.serving else self.order[-1]
        return self.target

    def wanted(self, role: str) -> int:
        """The pods wanted of a component: stated, or asked for by its scaler within the bounds."""
        stated = self.spec.get(role, {})
        bounds = stated.get("scaling")
        if bounds is None:
            return stated.get("replicas", 1)
        asked = self.scalers[role]["spec"]["replicas"] if role in self.scalers else 0
        return min(max(asked, bounds.get("minReplicas", 1)), bounds["maxReplicas"])

    def of(self, role: str, revision: str | None) -> list[Body]:
        """The pods of a component of a revision."""
        return [pod for pod in self.pods if (label(pod, ROLE), label(pod, REVISION)) == (role, revision)]

    def workload(self, role: str, revision: str | None) -> Body | None:
        found = [body for body in self.workloads if (label(body, ROLE), label(body, REVISION)) == (role, revision)]
        return found[0] if len(found) == 1 else None

    def share(self, revision: str) -> Fraction:
        """The part of the wanted engines that a revision gives, in pairs."""
        wanted = [self.wanted(role) for role in ENGINES]
        if 0 in wanted or revision not in self.routed:
            return Fraction(0)
        have = [len(ready(self.of(role, revision))) for role in ENGINES]
        return min(Fraction(1), *map(Fraction, have, wanted))

    def is_made(self, role: str, revision: str | None) -> bool:
        """Whether the workload has as many pods as it asks for, all ready, and Kubernetes has acted on its newest."""
        body = self.workload(role, revision)
        if body is None:
            return False
        asked, seen, mine = body["spec"]["replicas"], body.get("status", {}), self.of(role, revision)
        is_acted_on = seen.get("observedGeneration", 0) >= body["metadata"]["generation"]
        is_new = seen.get("updatedReplicas", 0) >= asked
        return is_acted_on and is_new and len(mine) == len(ready(mine)) == asked


def facts_of(owner: Body, target: str | None, everything: Iterable[Body], checked: Checked | None = None) -> Facts:
    """Find what belongs to an object. `target` is the revision of its spec, None of one that is refused."""
    uid, namespace = owner["metadata"]["uid"], owner["metadata"]["namespace"]
    mine = [
        body
        for body in everything
        if body["metadata"]["namespace"] == namespace and label(body, NAME) == owner["metadata"]["name"]
    ]
    owned = [
        body
        for body in mine
        if "deletionTimestamp" not in body["metadata"]
        and any(each["uid"] == uid for each in body["metadata"].get("ownerReferences", []))
    ]
    return Facts(
        owner,
        target,
        pods=[body for body in mine if body["kind"] == "Pod" and _is_there(body)],
        workloads=[body for body in owned if body["kind"] == "Deployment"],
        scalers={label(body, ROLE): body for body in owned if body["kind"] == SCALER},
        checked=checked,
    )


def expected_status(facts: Facts) -> dict[str, Any]:
    """Return what the status must say; conditions are a map from type to status and reason."""
    target, serving = facts.target, facts.serving
    is_rolling = target is not None and bool(facts.others)
    current = target if target in serving else (serving[-1] if serving else None)
    checked = _standing_check(facts, current)
    is_wanted = facts.spec.get("transferCheck", {}).get("enabled", True)
    unchecked = ("Unknown", "NotChecked" if is_wanted else "Disabled")
    return {
        "observedGeneration": facts.owner["metadata"]["generation"],
        "currentRevision": current,
        "updateRevision": target,
        **{role: _counts(facts, role) for role in ROLES},
        "conditions": {**_conditions(facts), "KVTransferVerified": checked.said if checked else unchecked},
        "transferCheck": {"revision": checked.revision, "engines": checked.engines, "lastTime": checked.at}
        if checked
        else None,
        "generations": {facts.owner["metadata"]["generation"]},
        "revisions": [_revision(facts, revision) for revision in facts.order] if is_rolling else None,
        "resolved": _resolved(facts.spec),
        "parallelism": " -> ".join("{tensor}/{decodeContext}".format(**_sizes(facts.spec[role])) for role in ENGINES),
        "scalers": {role: _scaler(facts, role) for role in facts.scalers},
    }


def said_status(facts: Facts) -> dict[str, Any]:
    """Return what the stored statuses say, in the form of `expected_status`."""
    status: Body = facts.owner.get("status", {})
    kinds = (*CONDITIONS, "KVTransferVerified")
    ours = [entry for entry in status.get("conditions", []) if entry["type"] in kinds]
    same = (
        "observedGeneration",
        "currentRevision",
        "updateRevision",
        *ROLES,
        "resolved",
        "parallelism",
        "transferCheck",
    )
    return {
        **{key: status.get(key) for key in same},
        "conditions": {entry["type"]: (entry["status"], entry["reason"]) for entry in ours},
        "generations": {entry.get("observedGeneration") for entry in ours},
        "revisions": status["rollout"].get("revisions") if "rollout" in status else None,
        "scalers": {role: _said_by(scaler) for role, scaler in facts.scalers.items()},
    }


def _standing_check(facts: Facts, current: str | None) -> Checked | None:
    """Return the last check where its result stands: of the revision that serves, or while none does."""
    if not facts.spec.get("transferCheck", {}).get("enabled", True) or facts.wanted("router") == 0:
        return None
    checked = facts.checked
    return checked if checked is not None and current in (None, checked.revision) else None


def _conditions(facts: Facts) -> dict[str, Said]:
    components = {role: _component(facts, role) for role in ROLES}
    found = {reason for status, reason in components.values() if status == "False"}
    if facts.target is None:
        found.add("InvalidSpec")
    worst = next((reason for reason in _TROUBLES if reason in found), None)
    is_begun = facts.target in facts.order and not facts.others
    is_held = facts.is_paused and facts.target is not None and not is_begun
    if is_held and (worst is None or worst in _TAKES_TIME):
        worst = "Paused"
    is_ready = worst is None and not facts.others and facts.shown == facts.target
    # Only the own revision's number of pods can be as wanted while others are left.
    why = worst or "RollingOut"
    capacity = min(Fraction(1), sum(map(facts.share, facts.order), Fraction(0)))
    if capacity > 0:
        is_enough = capacity >= _floor(facts)
        available = ("True", "Serving") if is_enough else ("False", "CapacityBelowFloor")
    else:
        available = ("False", why)
    if facts.is_paused and worst in (None, "Paused"):
        progressing = ("False", "Paused")
    elif is_ready:
        progressing = ("False", "RolledOut")
    else:
        progressing = ("True", "RollingOut") if why in _TAKES_TIME else ("False", why)
    return {
        "Ready": ("True", "Serving") if is_ready else ("False", why),
        "Available": available,
        "Progressing": progressing,
        **{COMPONENT_CONDITIONS[role]: said for role, said in components.items()},
        "ConfigCompatible": _compatible(facts, components),
    }


def _component(facts: Facts, role: str) -> Said:
    wanted, shown = facts.wanted(role), facts.shown
    body = facts.workload(role, shown)
    if role == "router" and wanted == 0 and facts.has_users_router(shown):
        return ("False", "RollingOut") if facts.of(role, shown) else ("True", "OwnRouter")
    if wanted == 0 and shown is not None:
        return ("False", "ScaledToZero")
    if body is None or not facts.is_made(role, shown):
        return ("False", "PodsPending")
    return ("True", "PodsReady") if body["spec"]["replicas"] == wanted else ("False", "RollingOut")


def _compatible(facts: Facts, components: Mapping[str, Said]) -> Said:
    if facts.target is None:
        return ("False", "InvalidSpec")
    is_proved = facts.shown == facts.target and all(components[role][0] == "True" for role in ENGINES)
    if "geometry" not in facts.spec["model"] and not is_proved:
        return ("Unknown", "ModelUnknown")
    return ("True", "RulesPassed")


def _revision(facts: Facts, revision: str) -> Body:
    counts = {role: len(ready(facts.of(role, revision))) for role in ROLES}
    return {"revision": revision, "share": f"{floor(facts.share(revision) * 100)}%", **counts}


def _counts(facts: Facts, role: str) -> dict[str, int]:
    mine = [pod for pod in facts.pods if label(pod, ROLE) == role]
    has_node = [pod for pod in mine if pod["status"]["phase"] == "Running" or condition(pod, "PodScheduled") == "True"]
    return {
        "replicas": len(mine),
        "readyReplicas": len(ready(mine)),
        "updatedReplicas": len([pod for pod in mine if label(pod, REVISION) == facts.target]),
        "scheduledReplicas": len(has_node),
    }


def _sizes(role: Body) -> dict[str, int]:
    return {"tensor": 1, "decodeContext": 1, **role.get("parallelism", {})}


def _resolved(spec: Body) -> Body:
    def engine(role: Body) -> Body:
        sizes = _sizes(role)
        longest = role.get("maxModelLen") or spec["model"].get("geometry", {}).get("maxModelLen")
        return {
            "tensor": sizes["tensor"],
            "decodeContext": sizes["decodeContext"],
            "blockSize": role["blockSize"],
            "kvCacheInterleaveSize": role.get("kvCacheInterleaveSize", role["blockSize"]),
            # The walks' engines run on CPUs.
            "accelerators": 0,
            **({"maxModelLen": longest} if longest is not None else {}),
        }

    roles = {role: engine(spec[role]) for role in ENGINES}
    return {**roles, "kvCapacityGain": f"{roles['decode']['decodeContext']}x"}


def _scaler(facts: Facts, role: str) -> Body | None:
    """Return what a scaler's status says; None for a role that states its number: its scaler is about to go."""
    bounds, scaler = facts.spec[role].get("scaling"), facts.scalers[role]
    if bounds is None:
        return None
    asked, wanted = scaler["spec"]["replicas"], facts.wanted(role)
    reason = "Within" if asked == wanted else ("ClampedToMin" if asked < wanted else "ClampedToMax")
    return {
        "replicas": len([pod for pod in facts.pods if label(pod, ROLE) == role]),
        "selector": {f"{NAME}={facts.owner['metadata']['name']}", f"{ROLE}={role}"},
        "bounded": (str(asked != wanted), reason, scaler["metadata"]["generation"]),
    }


def _said_by(scaler: Body) -> Body:
    status = scaler.get("status", {})
    return {
        "replicas": status.get("replicas"),
        "selector": set(status.get("selector", "").split(",")),
        "bounded": next(
            (
                (entry["status"], entry["reason"], entry.get("observedGeneration"))
                for entry in status.get("conditions", [])
                if entry["type"] == "Bounded"
            ),
            None,
        ),
    }


def _floor(facts: Facts) -> Fraction:
    strategy = facts.spec.get("rolloutStrategy", {})
    result = Fraction(1)
    for role in ENGINES:
        count = facts.wanted(role)
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


def ready(pods: list[Body]) -> list[Body]:
    """Return the pods whose Ready condition is True."""
    return [pod for pod in pods if condition(pod, "Ready") == "True"]


def condition(pod: Body, kind: str) -> str | None:
    """Return the status of a pod's condition."""
    found = [entry["status"] for entry in pod["status"].get("conditions", []) if entry["type"] == kind]
    return found[0] if found else None


def label(body: Body, key: str) -> str:
    """Return a label, empty where it is absent."""
    return body["metadata"].get("labels", {}).get(key, "")


def _is_there(pod: Body) -> bool:
    return "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] not in ("Succeeded", "Failed")
