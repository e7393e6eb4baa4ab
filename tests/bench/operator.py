"""`make bench-operator`: what the operator's work costs, beside plain Deployments of the same pods in the same run.

An engine's pod says several times as much as the smallest one, and each step of the API server, its controllers and the
nodes costs accordingly, with an operator or without. So the targets are beside the very Deployments that an object
becomes, applied by hand; what these take beside minimal ones is shown too.
Pods run on fake nodes (docs/adr/0018-load-and-faults.md), the controller is a process of the checkout, and the machine
should do nothing else meanwhile. `--only NAME...` runs some of the parts and leaves the figures of the
others as they are.
"""

import argparse
import itertools
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dcp_operator import names
from devcluster import startup
from devcluster.errors import DevClusterError
from devcluster.fake_nodes import fake_nodes
from devcluster.files import locked
from devcluster.paths import this_cache
from devcluster.progress import Progress
from tests.bench.report import Figure, publish
from tests.support.cluster import Cluster, cluster
from tests.support.cluster_watch import ApiServer, Seen
from tests.support.operator_load import (
    Load,
    Pods,
    is_ready,
    load_object,
    operator_writes,
    plain_deployment,
    same_deployments,
)
from tests.support.operator_process import Process, controller, install_crd, webhook

NAMESPACE = "dcp-bench"
ROUNDS = 25
REVIEWS = 300
#: Pods of an object with one engine per role: these and a router.
SMALL_PODS = 3
MANY, MOST = 100, 500
#: Engines of each of the large number of objects; with the router 4 pods.
MOST_ENGINES = {"prefill": 2, "decode": 1}
MOST_PODS = sum(MOST_ENGINES.values()) + 1
DEATHS = 200
ROLL_REPLICAS, ROLL_POD_S = 4, 3.0
MIB = 2**20 / 1e6


class Bench:
    """What the parts share: the cluster, a namespace of it, and the controller that looks after that."""

    def __init__(self, real: Cluster, api: ApiServer, folder: Path, steady_s: float) -> None:
        self.real = real
        self.api = api
        self.load = Load(api, NAMESPACE)
        self.folder = folder
        self.steady_s = steady_s
        self._numbers = itertools.count()

    def name(self, kind: str) -> str:
        """Return a name that no object had before."""
        return f"{kind}-{next(self._numbers)}"

    @contextmanager
    def controller(self) -> Iterator[Process]:
        with controller(self.real, self.folder, NAMESPACE) as process:
            yield process


def one_object(bench: Bench) -> list[Figure]:
    """One object, from its ADDED event to its pods."""
    load = bench.load
    ours: list[float] = []
    same: list[float] = []
    minimal: list[float] = []
    with bench.controller():
        for _ in range(ROUNDS):
            for times, manifests in (
                (ours, [load_object(bench.name("one"))]),
                (same, same_deployments(bench.name("same"))),
                (minimal, _minimal(bench, SMALL_PODS)),
            ):
                times.append(load.time(manifests, SMALL_PODS).to_pods_s)
                load.empty()
    by_hand = statistics.median(same)
    return [
        Figure(f"one object to {SMALL_PODS} pods created", statistics.median(ours), "s", by_hand, target=1.8),
        Figure("the same Deployments by hand, beside minimal ones", by_hand, "s", statistics.median(minimal)),
    ]


def many_objects(bench: Bench) -> list[Figure]:
    """A hundred objects at once."""
    load, num_pods = bench.load, MANY * SMALL_PODS
    minimal = load.time(_minimal(bench, num_pods), num_pods).to_ready_s
    load.empty()
    by_hand = [each for _ in range(MANY) for each in same_deployments(bench.name("same"))]
    same = load.time(by_hand, num_pods).to_ready_s
    load.empty()
    with bench.controller() as process:
        before = operator_writes(bench.api)
        ours = load.time([load_object(bench.name("many")) for _ in range(MANY)], num_pods).to_ready_s
        load.wait_until_serving(MANY)
        written = operator_writes(bench.api) - before
        memory = _peak_bytes(process)
        load.empty()
    return [
        Figure(f"{MANY} objects at once to {num_pods} pods Ready", ours, "s", same, target=2.5),
        Figure(f"the same {num_pods} Deployments by hand, beside minimal ones", same, "s", minimal),
        Figure("writes per object until it is Ready, events left out", written.count / MANY, "", target=15),
        Figure("conflicts among them", written.conflicts, "", target=0),
        Figure(f"controller's memory with {MANY} objects, peak", memory / 1e6, "MB", target=150),
    ]


def most_objects(bench: Bench) -> list[Figure]:
    """Five hundred objects: memory, rest, restart, reaction."""
    load = bench.load
    with bench.controller() as process:
        start = time.monotonic()
        load.create([_large(f"most-{number}") for number in range(MOST)])
        load.wait_until_serving(MOST, 600)
        figures = [
            Figure(f"{MOST} objects with {MOST_PODS} pods each until Ready", time.monotonic() - start, "s"),
            Figure(f"controller's memory with {MOST} objects, peak", _peak_bytes(process) / 1e6, "MB", target=300),
        ]
        figures += _steady(bench, process)
        figures += _restart(bench, process)
        figures += _reaction(bench)
    load.empty(600)
    return figures


def _steady(bench: Bench, process: Process) -> list[Figure]:
    _wait_until_idle(bench, process)
    writes, used, start = operator_writes(bench.api), process.cpu_s(), time.monotonic()
    time.sleep(bench.steady_s)
    seconds = time.monotonic() - start
    share = (process.cpu_s() - used) / seconds
    minutes = f"{seconds / 60:.1f} min"
    return [
        Figure(f"writes in {minutes} of steady state", (operator_writes(bench.api) - writes).count, "", target=0),
        Figure(f"processor time in {minutes} of steady state", share * 100, "% of a core", target=2),
    ]


def _wait_until_idle(bench: Bench, process: Process, timeout_s: float = 60.0) -> None:
    """Wait until the controller has nothing to do for a second."""
    deadline = time.monotonic() + timeout_s
    while True:
        writes, used = operator_writes(bench.api), process.cpu_s()
        time.sleep(1)
        if operator_writes(bench.api) == writes and process.cpu_s() - used < 0.1:
            return
        assert time.monotonic() < deadline, f"the controller is not idle after {timeout_s} s"


def _restart(bench: Bench, process: Process) -> list[Figure]:
    """Kill the controller, take Services away while it is gone, and see when they are back."""
    services = f"/api/v1/namespaces/{NAMESPACE}/services"
    uids = _pod_uids(bench)
    process.stop(signal.SIGKILL)
    victims = [f"most-{number}" for number in range(0, MOST, MOST // 5)]
    for victim in victims:
        bench.api.call("DELETE", f"{services}/{victim}")
    start = time.monotonic()
    process.start()
    while not {service["metadata"]["name"] for service in bench.api.items(services)} >= set(victims):
        assert time.monotonic() - start < 120, "the controller has not caught up after 120 s"
        time.sleep(0.2)
    caught_up_s = time.monotonic() - start
    _wait_until_idle(bench, process)
    return [
        Figure(f"controller restart with {MOST} objects until it has caught up", caught_up_s, "s", target=30),
        Figure("pods that a restart touched", len(uids ^ _pod_uids(bench)), "", target=0),
    ]


def _pod_uids(bench: Bench) -> set[tuple[str, str]]:
    pods = bench.api.items(bench.load.pods)
    return {(pod["metadata"]["uid"], pod["metadata"]["resourceVersion"]) for pod in pods}


def _reaction(bench: Bench) -> list[Figure]:
    """Delete engine pods one after another; how long until the status of each object says that it is not whole."""
    died: dict[str, float] = {}
    said: dict[str, float] = {}

    def pod(seen: Seen) -> None:
        if seen.kind == "DELETED":
            died.setdefault(seen.body["metadata"]["labels"][names.LABEL_NAME], seen.at)

    def status(seen: Seen) -> None:
        if not is_ready(seen.body):
            said.setdefault(seen.body["metadata"]["name"], seen.at)

    victims = {}
    for body in bench.api.items(f"{bench.load.pods}?labelSelector={names.LABEL_ROLE}=decode"):
        victims.setdefault(body["metadata"]["labels"][names.LABEL_NAME], body["metadata"]["name"])
    with bench.api.watch(bench.load.pods, pod), bench.api.watch(bench.load.objects, status):
        for victim in list(victims.values())[:DEATHS]:
            bench.api.call("DELETE", f"{bench.load.pods}/{victim}", {"gracePeriodSeconds": 0})
            time.sleep(0.05)
        deadline = time.monotonic() + 30
        while len(said) < DEATHS and time.monotonic() < deadline:
            time.sleep(0.1)
    assert len(said) >= DEATHS, f"{len(said)} of {DEATHS} objects said that a pod of theirs was gone"
    times = [max(0.0, said[name] - died[name]) for name in died if name in said]
    p99 = statistics.quantiles(times, n=100)[98]
    return [Figure(f"a pod's death to the status that says so, p99 of {len(times)}", p99, "s", target=2.0)]


def rolling_update(bench: Bench) -> list[Figure]:
    """Four engines of each role are replaced, one more than four at a time, each Ready after three seconds."""
    load, replicas = bench.load, ROLL_REPLICAS
    roles = ("roll-prefill", "roll-decode")
    load.create([plain_deployment(role, replicas, ready_after_s=ROLL_POD_S, version="1") for role in roles])
    _wait_for_pods(bench, 2 * replicas)
    edits = [plain_deployment(role, replicas, ready_after_s=ROLL_POD_S, version="2") for role in roles]
    plain, _ = _roll(bench, lambda: [_replace(bench, load.deployments, edit) for edit in edits], 2 * replicas)
    load.empty()
    with bench.controller():
        sizes = {"prefill": replicas, "decode": replicas, "ready_after_s": ROLL_POD_S}
        load.create([load_object("roll", **sizes)])
        load.wait_until_serving(1)
        edited = load_object("roll", **sizes, args=["--seed=7"])
        ours, lowest = _roll(bench, lambda: _replace(bench, load.objects, edited), 2 * replicas)
        load.empty()
    ideal = replicas * ROLL_POD_S
    return [
        Figure(
            f"{replicas}+{replicas} rolling update with {ROLL_POD_S:g} s pods, beside the ideal", ours, "s", ideal, 1.1
        ),
        Figure("the same of plain Deployments, beside the ideal", plain, "s", ideal),
        Figure("fewest ready engines of a role meanwhile", lowest, "", target=replicas, better="higher"),
    ]


def _roll(bench: Bench, edit: Callable[[], Any], num_new: int) -> tuple[float, int]:
    """Edit; return the seconds until as many new engine pods are Ready and no old one is left, and the fewest ready.

    The fewest ready are those of the role, or Deployment, that had fewest at any moment.
    """
    alive = {body["metadata"]["name"]: body for body in _engine_pods(bench)}
    old = set(alive)
    lowest = [min(_ready_by_group(alive).values())]
    pods = Pods()

    def take(seen: Seen) -> None:
        if seen.body["metadata"]["labels"].get(names.LABEL_ROLE) == names.ROUTER:
            return
        if seen.kind == "DELETED" or "deletionTimestamp" in seen.body["metadata"]:
            alive.pop(seen.body["metadata"]["name"], None)
        else:
            alive[seen.body["metadata"]["name"]] = seen.body
        lowest[0] = min(lowest[0], *_ready_by_group(alive).values())
        pods.take(seen)

    with bench.api.watch(bench.load.pods, take):
        start = time.monotonic()
        edit()
        pods.wait("the new pods are Ready", lambda: len(pods.ready.keys() - old) >= num_new, 120)
        pods.wait("the old pods are gone", lambda: not old & alive.keys(), 120)
    return max(at for name, at in pods.ready.items() if name not in old) - start, lowest[0]


def _ready_by_group(alive: dict[str, Any]) -> dict[str, int]:
    groups: dict[str, int] = {}
    for body in alive.values():
        labels = body["metadata"]["labels"]
        group = labels.get(names.LABEL_ROLE) or labels[names.LABEL_NAME]
        groups[group] = groups.get(group, 0) + is_ready(body)
    return groups


def _engine_pods(bench: Bench) -> list[dict[str, Any]]:
    pods = bench.api.items(bench.load.pods)
    return [body for body in pods if body["metadata"]["labels"].get(names.LABEL_ROLE) != names.ROUTER]


def _wait_for_pods(bench: Bench, number: int) -> None:
    deadline = time.monotonic() + 60
    while sum(map(is_ready, bench.api.items(bench.load.pods))) < number:
        assert time.monotonic() < deadline, f"{number} pods are not Ready"
        time.sleep(0.2)


def _replace(bench: Bench, path: str, manifest: dict[str, Any]) -> None:
    where, merge = f"{path}/{manifest['metadata']['name']}", "application/merge-patch+json"
    bench.api.call("PATCH", where, {"spec": manifest["spec"]}, merge)


def admission(bench: Bench) -> list[Figure]:
    """Creates that the webhook judges, beside creates that it doesn't; none is stored."""
    config_maps = f"/api/v1/namespaces/{NAMESPACE}/configmaps?dryRun=All"
    data = {"metadata": {"name": "review"}, "data": {"key": "value"}}
    with webhook(bench.real, bench.folder, NAMESPACE):
        path, manifest = f"{bench.load.objects}?dryRun=All", load_object("review")
        reviewed = _latencies(lambda: bench.api.call("POST", path, manifest))
        unreviewed = _latencies(lambda: bench.api.call("POST", config_maps, data))
    return [
        Figure("admission of a create, p50", reviewed[0] * 1e3, "ms", unreviewed[0] * 1e3),
        Figure("admission of a create, p99", reviewed[1] * 1e3, "ms", unreviewed[1] * 1e3),
    ]


def _latencies(create: Callable[[], object]) -> tuple[float, float]:
    """Median and 99th percentile of a request, in seconds."""
    times: list[float] = []
    for number in range(REVIEWS + 20):
        start = time.monotonic()
        create()
        if number >= 20:
            times.append(time.monotonic() - start)
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


PARTS: dict[str, Callable[[Bench], list[Figure]]] = {
    "one": one_object,
    "many": many_objects,
    "rolling": rolling_update,
    "most": most_objects,
    "admission": admission,
}


def _minimal(bench: Bench, number: int) -> list[dict[str, Any]]:
    """As many Deployments as pods, of pods that say next to nothing."""
    return [plain_deployment(bench.name("plain"), 1) for _ in range(number)]


def _large(name: str) -> dict[str, Any]:
    # A pod that takes its time to be Ready leaves its absence visible.
    return load_object(name, **MOST_ENGINES, ready_after_s=3.0)


def _peak_bytes(process: Process) -> int:
    return process.memory_kib("VmHWM") * 1024


def main(arguments: list[str]) -> int:
    """Run the bench. Exit code 0 when all targets are reached, 1 when not, 2 with a sentence when a step failed."""
    parser = argparse.ArgumentParser(prog="bench-operator", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="run these parts")
    parser.add_argument("--steady-s", type=float, default=300.0, help="length of the steady state (default 300)")
    options = parser.parse_args(arguments)
    cache, log = this_cache(), Progress()
    figures: list[Figure] = []
    try:
        with locked(cache.locks / "cluster.lock", log, "the local cluster"):
            startup.up(cache, log, lambda: None)
        real, api = cluster(), ApiServer(cache.cluster)
        install_crd(real)
        real.kubectl("apply", "-f", "-", input=json.dumps(_NAMESPACE))
        with tempfile.TemporaryDirectory() as folder, fake_nodes(cache, log, "fake-0", "fake-1", "fake-2", "fake-3"):
            bench = Bench(real, api, Path(folder), options.steady_s)
            try:
                for part in options.only:
                    log(f"bench operator: {part}")
                    figures += PARTS[part](bench)
            finally:
                bench.load.empty()
                real.kubectl("delete", "namespace", NAMESPACE, "--timeout=180s", timeout_s=200)
    except (DevClusterError, AssertionError) as error:
        print(f"bench operator: {error}", file=sys.stderr)
        return 2
    return 0 if publish("operator", figures, partial=set(options.only) != set(PARTS)) else 1


_NAMESPACE = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
