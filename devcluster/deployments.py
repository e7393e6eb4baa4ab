"""Waits for a DCPDisaggDeployment and measures what its engines did: shared by the demo, the tests and the benches."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from devcluster.errors import DevClusterError
from devcluster.metrics import scrape, total
from devcluster.progress import Log
from devcluster.workloads import ENGINE_PORT

#: kubectl with the cluster's kubeconfig: arguments in, standard output back.
Kubectl = Callable[..., str]

RESOURCE = "dcpdisaggdeployments.dcpdisagg.io"
_POLL_S = 1.0


def condition(resource: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return one condition of an object's status; one that is Unknown where it is missing."""
    for entry in resource.get("status", {}).get("conditions", []):
        if entry["type"] == kind:
            return entry
    return {"type": kind, "status": "Unknown", "reason": "Missing", "message": "the operator has not judged it yet"}


def is_ready(resource: dict[str, Any]) -> bool:
    """Say whether Ready is True for the generation that is stored now."""
    seen = resource.get("status", {}).get("observedGeneration")
    return seen == resource["metadata"]["generation"] and condition(resource, "Ready")["status"] == "True"


def wait_until_ready(
    kubectl: Kubectl, namespace: str, name: str, log: Log, *, timeout_s: float = 420.0
) -> dict[str, Any]:
    """Wait until the object is Ready, saying each change of its conditions. Returns the object.

    Raises DevClusterError with the conditions' own words when the time is over.
    """
    deadline = time.monotonic() + timeout_s
    said = ""
    while True:
        resource = json.loads(kubectl("get", RESOURCE, name, "-n", namespace, "-o", "json"))
        if is_ready(resource):
            return resource
        ready = condition(resource, "Ready")
        words = f"{name} is not ready: {ready['reason']}: {ready['message']}"
        if words != said:
            log(words)
            said = words
        if time.monotonic() > deadline:
            raise DevClusterError(
                f"{words} (after {timeout_s:.0f} s); see: kubectl describe {RESOURCE} {name} -n {namespace}"
            )
        time.sleep(_POLL_S)


@dataclass(frozen=True, slots=True)
class Movement:
    """What a deployment's engines counted, summed over their pods."""

    sent_bytes: float
    received_bytes: float
    received_tokens: float
    decode_requests: float
    decode_computed_tokens: float
    decode_cached_tokens: float
    decode_external_tokens: float

    def __sub__(self, before: "Movement") -> "Movement":
        """Return what happened between two readings."""
        return Movement(*(getattr(self, name) - getattr(before, name) for name in self.__slots__))


def pod_addresses(kubectl: Kubectl, namespace: str, name: str, role: str) -> list[str]:
    """Return the addresses of a role's running pods."""
    selector = f"dcpdisagg.io/name={name},dcpdisagg.io/role={role}"
    pods = json.loads(kubectl("get", "pods", "-n", namespace, "-l", selector, "-o", "json"))["items"]
    return [
        pod["status"]["podIP"]
        for pod in pods
        if pod["status"].get("podIP") and "deletionTimestamp" not in pod["metadata"]
    ]


def read_movement(kubectl: Kubectl, namespace: str, name: str) -> Movement:
    """Read the counters of a deployment's engines."""

    def pages(role: str) -> list[str]:
        return [scrape(f"http://{ip}:{ENGINE_PORT}/metrics") for ip in pod_addresses(kubectl, namespace, name, role)]

    return count_movement(pages("prefill"), pages("decode"))


def count_movement(prefill: list[str], decode: list[str]) -> Movement:
    """Sum up metrics pages of engines of both roles (metric names of vLLM 0.32 and of the connector)."""

    def over(pages: list[str], metric: str, **labels: str) -> float:
        return sum(total(page, metric, **labels) for page in pages)

    by_source = "vllm:prompt_tokens_by_source_total"
    return Movement(
        sent_bytes=over(prefill, "vllm:dcp_kv_bytes_sent_total"),
        received_bytes=over(decode, "vllm:dcp_kv_bytes_received_total"),
        received_tokens=over(decode, "vllm:dcp_kv_tokens_received_total"),
        decode_requests=over(decode, "vllm:request_success_total"),
        decode_computed_tokens=over(decode, by_source, source="local_compute"),
        decode_cached_tokens=over(decode, by_source, source="local_cache_hit"),
        decode_external_tokens=over(decode, by_source, source="external_kv_transfer"),
    )
