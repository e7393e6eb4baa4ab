"""Which engines of a role go first when some go: the least loaded, by the requests that each has.

Kubernetes removes pods that are not ready before others, then those whose deletion costs least. The cost is an
annotation that has to be on the pods before their workload is scaled down. It is worked out afresh each time from what
the engines say of themselves, and never keeps a scale-down waiting.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dcp_operator.kinds import DEPLOYMENT, POD, Ref
from dcp_operator.names import LABEL_REVISION, LABEL_ROLE, ROUTER
from dcp_operator.observed import Body, Observed, section
from dcp_operator.ports import api_port_of
from dcp_operator.workloads import is_ready, pods_of

#: Kubernetes' annotation, and the cost of a pod without it.
COST: Final = "controller.kubernetes.io/pod-deletion-cost"
_NO_COST: Final = "0"
_MAX_COST: Final = 2**31 - 1
#: What counts as load: requests that run or wait, and finished ones whose KV another engine has yet to fetch.
_LOAD: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:dcp_kv_pinned_requests")


@dataclass(frozen=True, slots=True)
class Engine:
    """A pod that may go, and where it tells its load."""

    pod: Body
    url: str

    @property
    def name(self) -> str:
        """metadata.name."""
        return self.pod["metadata"]["name"]


def candidates(observed: Observed, ref: Ref, replicas: int) -> tuple[Engine, ...]:
    """Return the engines among which scaling a workload to `replicas` chooses; empty where there is nothing to choose.

    Pods that are not ready go first whatever they cost. Groups of a LeaderWorkerSet go by their number.
    """
    child = observed.children.get(ref)
    if child is None or ref.kind != DEPLOYMENT.kind or not child.belongs_to(observed.uid):
        return ()
    labels = section(child.body, "spec", "selector", "matchLabels")
    port = api_port_of(child.body)
    if labels.get(LABEL_ROLE) in (None, ROUTER) or port is None or replicas <= 0:
        return ()
    ready = [pod for pod in pods_of(observed, labels[LABEL_ROLE], labels.get(LABEL_REVISION)) if is_ready(pod)]
    if replicas >= len(ready) or replicas >= child.body["spec"].get("replicas", 1):
        return ()
    addresses = [(pod, section(pod, "status").get("podIP")) for pod in ready]
    return tuple(Engine(pod, _url(address, port)) for pod, address in addresses if address)


def load_of(page: str | None) -> float | None:
    """Return the requests that an engine has, from its page of metrics; None where it doesn't say."""
    if page is None:
        return None
    found: dict[str, float] = {}
    for line in page.splitlines():
        name = line.replace("{", " ", 1).partition(" ")[0]
        if name in _LOAD:
            try:
                found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
            except ValueError:
                return None
    total = sum(found.values())
    # Connectors of vLLM's own don't say what they hold. NaN is no number to compare by.
    return total if found.keys() >= set(_LOAD[:2]) and 0 <= total < float("inf") else None


def cost_patches(engines: Sequence[Engine], loads: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """Return what to apply to pods so that the least loaded go first; `loads` is by the pod's name.

    An engine that does not say counts as busier than all that do: the likeliest reason is that it has no time to.
    """
    known = [min(round(load), _MAX_COST - 1) for load in loads.values() if load is not None]
    unknown = max(known, default=0) + 1
    patches: list[dict[str, Any]] = []
    for engine in engines:
        load = loads.get(engine.name)
        cost = str(unknown if load is None else min(round(load), _MAX_COST - 1))
        metadata = engine.pod["metadata"]
        if section(engine.pod, "metadata", "annotations").get(COST, _NO_COST) != cost:
            # The uid: never another pod that has the name by now.
            identity = {key: metadata[key] for key in ("name", "namespace", "uid")}
            patches.append(
                {
                    "apiVersion": POD.api_version,
                    "kind": POD.kind,
                    "metadata": {**identity, "annotations": {COST: cost}},
                }
            )
    return patches


def _url(address: str, port: int) -> str:
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{port}/metrics"
