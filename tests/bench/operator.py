"""`make bench-operator`: how much time and how many writes the operator adds, on the local cluster.

Baselines are measured in the same run: a plain Deployment of as many pods, and a dry-run create that no webhook sees.
"""

import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import yaml
from kubernetes import client, config

from devcluster import release, startup
from devcluster.deployments import wait_until_ready
from devcluster.errors import DevClusterError
from devcluster.files import locked
from devcluster.paths import CHECKOUT, Cache, this_cache
from devcluster.progress import Progress
from devcluster.settings import ENGINE_IMAGE
from devcluster.tools import Tools
from tests.bench.report import Figure, publish
from tests.support.operator_process import stand_in

NAMESPACE = "dcp-bench"
GROUP, VERSION, PLURAL = "dcpdisagg.io", "v1alpha1", "dcpdisaggdeployments"
ENGINES_PER_ROLE = 2
PODS = 2 * ENGINES_PER_ROLE + 1
ROUNDS = 5
REVIEWS = 300
STEADY_S = 60.0
#: Kinds that nobody but the operator writes in an idle cluster. Deployments are written by their controller too, but
#: only the operator applies them.
OWN_RESOURCES = {PLURAL, "services", "secrets", "serviceaccounts", "roles", "rolebindings"}
WRITES = {"POST", "PUT", "PATCH", "APPLY", "DELETE"}
_REQUESTS = re.compile(r"^apiserver_request_total\{(?P<labels>[^}]*)\} (?P<count>\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def main() -> int:
    """Run the bench. Exit code 0 when all targets are reached, 1 when not, 2 with a sentence when a step failed."""
    cache, log = this_cache(), Progress()
    try:
        with locked(cache.locks / "cluster.lock", log, "the local cluster"):
            startup.up(cache, log, lambda: None)
        return 0 if publish("operator", _measure(cache, release.deploy(cache, log))) else 1
    except DevClusterError as error:
        print(f"bench operator: {error}", file=sys.stderr)
        return 2


def _measure(cache: Cache, tools: Tools) -> list[Figure]:
    config.load_kube_config(str(cache.cluster.kubeconfig))
    core, custom = client.CoreV1Api(), client.CustomObjectsApi()
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    tools.kubectl("apply", "-f", "-", stdin=json.dumps(namespace))
    try:
        ours = statistics.median(_apply_to_pods(core, tools, _deployment(f"bench-{n}"), "dcpd") for n in range(ROUNDS))
        plain = statistics.median(
            _apply_to_pods(core, tools, _plain_deployment(f"plain-{n}"), "deployment") for n in range(ROUNDS)
        )
        reviewed = _latencies(
            lambda number: custom.create_namespaced_custom_object(
                GROUP, VERSION, NAMESPACE, PLURAL, _deployment(f"review-{number}"), dry_run="All"
            )
        )
        unreviewed = _latencies(
            lambda number: core.create_namespaced_config_map(
                NAMESPACE, {"metadata": {"name": f"review-{number}"}, "data": {"key": "value"}}, dry_run="All"
            )
        )
        writes = _steady_writes(tools)
    finally:
        tools.kubectl("delete", "namespace", NAMESPACE, "--timeout=180s", timeout_s=200)
    return [
        Figure(f"apply to {PODS} pods created", ours, "s", plain, target=3.0),
        Figure("admission of a create, p50", reviewed[0] * 1e3, "ms", unreviewed[0] * 1e3),
        Figure("admission of a create, p99", reviewed[1] * 1e3, "ms", unreviewed[1] * 1e3),
        Figure("writes per minute in steady state", writes * 60 / STEADY_S, "1/min", target=0.0),
    ]


def _deployment(name: str) -> dict[str, Any]:
    """The CPU example with engines that only sleep: pods are made, nothing is computed."""
    manifest = yaml.safe_load((CHECKOUT / "examples" / "cpu-demo.yaml").read_text())
    manifest["metadata"] = {"name": name, "namespace": NAMESPACE}
    sleeper = {"name": "main", "command": ["/bin/sh", "-c", "sleep 3600"]}
    for role in ("prefill", "decode"):
        manifest["spec"][role] |= {"replicas": ENGINES_PER_ROLE, "template": {"spec": {"containers": [sleeper]}}}
    return manifest


def _plain_deployment(name: str) -> dict[str, Any]:
    labels = {"dcpdisagg.io/name": name}
    container = {"name": "main", "image": ENGINE_IMAGE, "command": ["/bin/sh", "-c", "sleep 3600"]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "replicas": PODS,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"terminationGracePeriodSeconds": 0, "containers": [container]},
            },
        },
    }


def _apply_to_pods(core: client.CoreV1Api, tools: Tools, manifest: dict[str, Any], kind: str) -> float:
    name = manifest["metadata"]["name"]
    start = time.monotonic()
    tools.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    while len(core.list_namespaced_pod(NAMESPACE, label_selector=f"dcpdisagg.io/name={name}").items) < PODS:
        if time.monotonic() - start > 60:
            raise DevClusterError(f"{kind} {name} has fewer than {PODS} pods after 60 s")
        time.sleep(0.02)
    took = time.monotonic() - start
    tools.kubectl("delete", kind, name, "-n", NAMESPACE, "--wait=false")
    tools.kubectl("delete", "pod", "-n", NAMESPACE, "-l", f"dcpdisagg.io/name={name}", "--grace-period=0", "--force")
    return took


def _latencies(create: Callable[[int], object]) -> tuple[float, float]:
    """Median and 99th percentile of a request, in seconds."""
    for warmup in range(20):
        create(warmup)
    times: list[float] = []
    for number in range(REVIEWS):
        start = time.monotonic()
        create(number)
        times.append(time.monotonic() - start)
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


def _steady_writes(tools: Tools) -> int:
    """Write requests of the operator while nothing changes, with one object that is Ready."""
    tools.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=json.dumps(stand_in("steady")))
    wait_until_ready(tools.kubectl, NAMESPACE, "steady", lambda _: None)
    time.sleep(10)
    before = _writes(tools)
    time.sleep(STEADY_S)
    return _writes(tools) - before


def _writes(tools: Tools) -> int:
    count = 0.0
    for request in _REQUESTS.finditer(tools.kubectl("get", "--raw", "/metrics")):
        labels = dict(_LABEL.findall(request["labels"]))
        resource, verb = labels.get("resource"), labels.get("verb")
        if (resource in OWN_RESOURCES and verb in WRITES) or (resource == "deployments" and verb == "APPLY"):
            count += float(request["count"])
    return int(count) + _events(tools)


def _events(tools: Tools) -> int:
    """How often the operator has said something about the object."""
    selector = "involvedObject.kind=DCPDisaggDeployment,involvedObject.name=steady"
    events = json.loads(tools.kubectl("get", "events", "-n", NAMESPACE, "--field-selector", selector, "-o", "json"))
    return sum(int(event.get("count") or 1) for event in events["items"])


if __name__ == "__main__":
    sys.exit(main())
