"""A witness of rollouts on a real API server: every event of an object's pods and workloads, held to the bounds.

A pod counts as serving from when it is first ready until it is told to go. A probe that fails in between on a busy
machine is no deed of the operator's, and the planner only gets more careful by it.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from dcp_operator.kinds import LEADER_WORKER_SET
from tests.support.cluster import Cluster
from tests.support.cluster_watch import ApiServer, Seen
from tests.support.stand_ins import complete, first_answer

ENGINES = ("prefill", "decode")


@dataclass
class Witness:
    """What was seen of the object `name`, of which `wanted` engines of prefill and decode should run."""

    name: str
    wanted: tuple[int, int]
    #: Serving shares at every event, with what made them so.
    shares: list[tuple[Fraction, str]] = field(default_factory=list)
    #: The most engines that were asked for at once, by role.
    most: dict[str, int] = field(default_factory=dict)
    #: Everything that does not add up.
    faults: list[str] = field(default_factory=list)
    _pods: dict[str, tuple[str, str]] = field(default_factory=dict)
    _asked: dict[str, tuple[str, int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def watching(self, api: ApiServer, namespace: str, *, groups: bool = False) -> Iterator["Witness"]:
        """See everything that happens until the block ends, from the present state on.

        With `groups` a role may have LeaderWorkerSets, which the cluster then has to know.
        """
        selector = f"labelSelector=dcpdisagg.io/name%3D{self.name}"
        pods = f"/api/v1/namespaces/{namespace}/pods?{selector}"
        kinds = ["apps/v1", "deployments"], [LEADER_WORKER_SET.api_version, LEADER_WORKER_SET.plural]
        workloads = [f"/apis/{group}/namespaces/{namespace}/{plural}?{selector}" for group, plural in kinds]
        workloads = workloads if groups else workloads[:1]
        takers = {pods: self._take_pod, **dict.fromkeys(workloads, self._take_workload)}
        versions: dict[str, str] = {}
        for path, take in takers.items():
            items, versions[path] = api.listed(path)
            for body in items:
                take(Seen(0.0, "ADDED", body))
        # What counts is from when all pods of the beginning are known.
        del self.shares[:-1]
        with ExitStack() as stack:
            for path, take in takers.items():
                stack.enter_context(api.watch(path, take, versions[path]))
            yield self

    def judge(self) -> None:
        """Hold what was seen to maxSurge 1 and maxUnavailable 0."""
        lowest, event = self.lowest()
        assert lowest >= 1, f"only {lowest} served after {event}"
        for role, wanted in zip(ENGINES, self.wanted, strict=True):
            assert self.most[role] <= wanted + 1
        assert self.faults == []

    def lowest(self) -> tuple[Fraction, str]:
        """Return the smallest share that was served at any event, and that event."""
        with self._lock:
            return min(self.shares)

    def _take_pod(self, seen: Seen) -> None:
        metadata: dict[str, Any] = seen.body["metadata"]
        component, revision = (metadata["labels"][f"dcpdisagg.io/{key}"] for key in ("role", "revision"))
        goes = seen.kind == "DELETED" or "deletionTimestamp" in metadata
        with self._lock:
            if goes:
                self._pods.pop(metadata["name"], None)
            elif _is_ready(seen.body):
                self._pods[metadata["name"]] = (component, revision)
            if component == "router":
                self._judge_selectors(seen.body, revision)
            self.shares.append((self._share(), f"{seen.kind} {metadata['name']}"))

    def _judge_selectors(self, pod: dict[str, Any], revision: str) -> None:
        main = next(each for each in pod["spec"]["containers"] if each["name"] == "main")
        chosen = [arg for arg in main["args"] if arg.startswith("dcpdisagg.io/revision=")]
        if chosen != [f"dcpdisagg.io/revision={revision}"] * 2:
            self.faults.append(f"router of {revision} selects {chosen}")

    def _share(self) -> Fraction:
        counts: dict[str, dict[str, int]] = {}
        for component, revision in self._pods.values():
            of = counts.setdefault(revision, {})
            of[component] = of.get(component, 0) + 1
        shares = [
            min(Fraction(of.get(role, 0), want) for role, want in zip(ENGINES, self.wanted, strict=True))
            for of in counts.values()
            if of.get("router")
        ]
        return sum(shares, Fraction(0))

    def _take_workload(self, seen: Seen) -> None:
        metadata = seen.body["metadata"]
        with self._lock:
            if seen.kind == "DELETED" or "deletionTimestamp" in metadata:
                self._asked.pop(metadata["name"], None)
            else:
                self._asked[metadata["name"]] = (metadata["labels"]["dcpdisagg.io/role"], seen.body["spec"]["replicas"])
            for role in ENGINES:
                asked = sum(count for component, count in self._asked.values() if component == role)
                self.most[role] = max(asked, self.most.get(role, 0))


@contextmanager
def asked_all_the_time(real: Cluster, namespace: str, name: str) -> Iterator[list[tuple[str | None, str] | str]]:
    """Send requests to an object's Service until the block ends; what each went through, or why it failed."""
    address = real.get("service", name, "-n", namespace)["spec"]["clusterIP"]
    answers: list[tuple[str | None, str] | str] = [first_answer(address, model=name).revisions]
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            try:
                answers.append(complete(address, model=name, timeout_s=30).revisions)
            except OSError as error:
                answers.append(str(error))
            is_over.wait(0.05)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        is_over.set()
        thread.join()


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
