"""Faults of the cluster in the middle of a rollout and of a delete, on the real API server with pods on fake nodes.

The same faults at every single call are in tests/unit/test_faults.py; here is what only a real API server does.
"""

import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dcp_operator import names
from dcp_operator.api.base import KIND
from devcluster.fake_nodes import fake_nodes, node
from devcluster.metrics import scrape, total
from devcluster.paths import this_cache
from tests.support.cluster import Cluster, cluster
from tests.support.cluster_faults import kill_api_server
from tests.support.cluster_watch import ApiServer, Seen
from tests.support.operator_load import Load, is_ready, load_object
from tests.support.operator_process import Process, controller, free_port, wait_for, webhook, without_release

ENGINES = 2
POD_S = 1.0
END_S = 90.0
#: Kubernetes' collector of garbage finds its way back after the API server was away: it looks every half a minute.
COLLECTED_S = 300.0
NODES = ("fault-0", "fault-1")
MERGE = "application/merge-patch+json"
Body = dict


@pytest.fixture(scope="module")
def real() -> Iterator[Cluster]:
    with without_release(cluster(), image=False) as found, fake_nodes(this_cache(), lambda _: None, *NODES):
        yield found


@pytest.fixture(scope="module")
def load(real: Cluster) -> Iterator[Load]:
    with real.namespace("faults") as name:
        yield Load(ApiServer(this_cache().cluster), name)


@pytest.fixture(scope="module")
def operator(real: Cluster, load: Load, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    metrics = {"DCP_METRICS_PORT": str(free_port())}
    with controller(real, tmp_path_factory.mktemp("operator"), load.namespace, **metrics) as process:
        yield process


@pytest.fixture
def chat(load: Load, operator: Process) -> Iterator[Load]:
    """One object with two engines of each role, Ready, and somebody else's Service beside it."""
    theirs = {"metadata": {"name": "theirs", "labels": {names.LABEL_NAME: "chat"}}, "spec": {"ports": [{"port": 1}]}}
    services = f"/api/v1/namespaces/{load.namespace}/services"
    made = load.api.call("POST", services, theirs)
    load.create([load_object("chat", prefill=ENGINES, decode=ENGINES, ready_after_s=POD_S)])
    load.wait_until_serving(1)
    yield load
    assert (
        load.api.call("GET", f"{services}/theirs")["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    )
    load.api.call("DELETE", f"{services}/theirs")
    load.empty(60)
    secrets = f"/api/v1/namespaces/{load.namespace}/secrets?labelSelector={names.LABEL_NAME}=chat"
    wait_for("Kubernetes has removed all that was the object's", lambda: not load.api.items(secrets), COLLECTED_S)


def edit(load: Load, seed: int) -> None:
    manifest = load_object("chat", prefill=ENGINES, decode=ENGINES, ready_after_s=POD_S, args=[f"--seed={seed}"])
    load.api.call("PATCH", f"{load.objects}/chat", {"spec": manifest["spec"]}, MERGE)


def engines(load: Load) -> list[Body]:
    pods = load.api.items(f"{load.pods}?labelSelector={names.LABEL_NAME}=chat")
    return [pod for pod in pods if is_engine(pod)]


def is_engine(pod: Body) -> bool:
    return pod["metadata"]["labels"].get(names.LABEL_ROLE) in ("prefill", "decode")


def is_rolled_out(load: Load, seed: int) -> bool:
    """Whether all engines are of the edit, as many as wanted, and the status of this generation says so."""
    pods = engines(load)
    body = load.api.call("GET", f"{load.objects}/chat")
    args = [pod["spec"]["containers"][0]["args"] for pod in pods]
    return (
        len(pods) == 2 * ENGINES
        and all(map(is_ready, pods))
        and all(f"--seed={seed}" in each for each in args)
        and body["status"].get("observedGeneration") == body["metadata"]["generation"]
        and is_ready(body)
    )


@contextmanager
def never_fewer(load: Load, wanted: int) -> Iterator[None]:
    """Hold that as many engines of each role as wanted are ready at every moment that the API server tells of."""
    items, version = load.api.listed(load.pods)
    stays = [pod for pod in items if is_engine(pod) and "deletionTimestamp" not in pod["metadata"]]
    alive = {pod["metadata"]["uid"]: pod for pod in stays}
    fewest: list[int] = []

    def count() -> None:
        for role in ("prefill", "decode"):
            ready = [pod for pod in alive.values() if pod["metadata"]["labels"][names.LABEL_ROLE] == role]
            fewest.append(sum(map(is_ready, ready)))

    def take(seen: Seen) -> None:
        metadata = seen.body["metadata"]
        if not is_engine(seen.body):
            return
        if seen.kind == "DELETED" or "deletionTimestamp" in metadata:
            alive.pop(metadata["uid"], None)
        else:
            alive[metadata["uid"]] = seen.body
        count()

    with load.api.watch(load.pods, take, version):
        yield
    assert min(fewest) >= wanted


@dataclass
class Story:
    """What the API server told of an object and its pods and Deployments since it was asked."""

    told: list[Seen] = field(default_factory=list)
    _news: threading.Condition = field(default_factory=threading.Condition)

    def take(self, seen: Seen) -> None:
        with self._news:
            self.told.append(seen)
            self._news.notify_all()

    def wait(self, what: str, holds: Callable[[Seen], bool], times: int = 1) -> None:
        """Wait until so much of a kind was told."""
        with self._news:
            came = self._news.wait_for(lambda: sum(map(holds, self.told)) >= times, END_S)
            assert came, f"not within {END_S} s: {what}"


@contextmanager
def following(load: Load) -> Iterator[Story]:
    story = Story()
    with ExitStack() as stack:
        for path in (load.objects, load.deployments, load.pods):
            stack.enter_context(load.api.watch(path, story.take))
        yield story


def is_about(kind: str, role: str, how: str, *revisions: str) -> Callable[[Seen], bool]:
    """Whether it was told of a role's Deployment or pod of one of the revisions that it was made, is ready or goes."""

    def told(seen: Seen) -> bool:
        metadata = seen.body["metadata"]
        labels = metadata.get("labels", {})
        if seen.body["kind"] != kind or labels.get(names.LABEL_ROLE) != role or revision_of(seen.body) not in revisions:
            return False
        if how == "goes":
            return seen.kind == "DELETED" or (kind == "Pod" and "deletionTimestamp" in metadata)
        return seen.kind == "ADDED" if how == "is made" else is_ready(seen.body)

    return told


def revision_of(body: Body) -> str:
    labels = body["metadata"]["labels"]
    return labels.get(names.LABEL_REVISION) or body["spec"]["template"]["metadata"]["labels"][names.LABEL_REVISION]


def kill(operator: Process) -> None:
    """Kill the controller, start it again, and return when it follows everything."""
    operator.stop(signal.SIGKILL)
    operator.start()
    health = f"http://127.0.0.1:{operator.environment['DCP_HEALTH_PORT']}/readyz"
    wait_for("the controller is up", lambda: operator_answers(health))


def num_passes(operator: Process) -> float:
    """Return how many passes the controller has made since it started."""
    page = scrape(f"http://127.0.0.1:{operator.environment['DCP_METRICS_PORT']}/metrics")
    return total(page, "dcp_operator_reconcile_seconds_count")


def operator_answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def test_a_controller_that_is_killed_at_each_step_of_a_rollout_ends_it(chat: Load, operator: Process):
    old = {revision_of(pod) for pod in engines(chat)}
    with never_fewer(chat, ENGINES), following(chat) as story:
        edit(chat, 1)
        wait_for("the new revision is known", lambda: update_revision(chat) not in (None, *old))
        new = update_revision(chat)
        for kind, role, how, revisions in (
            ("Deployment", "decode", "is made", [new]),
            ("Pod", "prefill", "is ready", [new]),
            ("Pod", "decode", "goes", old),
            ("Pod", "router", "is ready", [new]),
            ("Deployment", "router", "goes", old),
            ("Deployment", "prefill", "goes", old),
        ):
            story.wait(f"{kind} of {role} {how}", is_about(kind, role, how, *revisions))
            kill(operator)
        wait_for("the rollout has ended", lambda: is_rolled_out(chat, 1), END_S)
    assert {revision_of(body) for body in chat.api.items(chat.deployments)} == {new}


def update_revision(load: Load) -> str | None:
    return load.api.call("GET", f"{load.objects}/chat")["status"].get("updateRevision")


def test_a_controller_that_is_killed_at_each_step_of_a_delete_makes_nothing_again(chat: Load, operator: Process):
    """Kubernetes deletes what the object owns before it, one engine last, which is held for three kills."""
    held = next(pod for pod in engines(chat) if pod["metadata"]["labels"][names.LABEL_ROLE] == "decode")
    pod, uid = f"{chat.pods}/{held['metadata']['name']}", held["metadata"]["uid"]
    chat.api.call("PATCH", pod, {"metadata": {"finalizers": ["example.com/held"]}}, MERGE)

    def engine_goes(seen: Seen) -> bool:
        return seen.body["kind"] == "Pod" and seen.kind == "DELETED" and is_engine(seen.body)

    def is_made(seen: Seen) -> bool:
        return seen.body["kind"] == "Deployment" and seen.kind == "ADDED"

    def object_goes(seen: Seen) -> bool:
        return seen.body["kind"] == KIND and "deletionTimestamp" in seen.body["metadata"]

    with following(chat) as story:
        chat.api.call("DELETE", f"{chat.objects}/chat", {"propagationPolicy": "Foreground"})
        story.wait("the object begins to go", object_goes)
        kill(operator)
        story.wait("an engine is gone", engine_goes)
        kill(operator)
        story.wait("all engines but one are gone", engine_goes, 2 * ENGINES - 1)
        kill(operator)
        wait_for("the controller has looked at what is left", lambda: num_passes(operator) > 0)
        chat.api.call("PATCH", pod, {"metadata": {"finalizers": None, "uid": uid}}, MERGE)
        story.wait("the last engine is gone", engine_goes, 2 * ENGINES)
        kill(operator)
        story.wait("the object is gone", lambda seen: seen.body["kind"] == KIND and seen.kind == "DELETED")
        kill(operator)
        made = [seen.body["metadata"]["name"] for seen in story.told if is_made(seen)]
    assert not made
    wait_for("nothing is left", lambda: not chat.api.items(chat.deployments) and not chat.api.items(chat.pods), END_S)
    chat.create([load_object("chat", prefill=ENGINES, decode=ENGINES, ready_after_s=POD_S)])
    chat.wait_until_serving(1, END_S)
    assert len(engines(chat)) == 2 * ENGINES


def test_a_controller_that_is_frozen_misses_nothing(chat: Load, operator: Process):
    services = f"/api/v1/namespaces/{chat.namespace}/services"
    operator.send(signal.SIGSTOP)
    try:
        chat.api.call("DELETE", f"{services}/chat")
        edit(chat, 2)
        victim = engines(chat)[0]["metadata"]["name"]
        chat.api.call("DELETE", f"{chat.pods}/{victim}", {"gracePeriodSeconds": 0})
    finally:
        operator.send(signal.SIGCONT)
    wait_for("the rollout has ended", lambda: is_rolled_out(chat, 2), END_S)
    assert "chat" in {service["metadata"]["name"] for service in chat.api.items(services)}


def test_an_api_server_that_restarts_in_the_middle_of_a_rollout_delays_it_only(chat: Load, operator: Process):
    edit(chat, 3)
    wait_for("new engines are made", lambda: len(engines(chat)) > 2 * ENGINES, 30)
    kill_api_server(down_s=1.0)
    with never_fewer(chat, ENGINES):
        wait_for("the rollout has ended", lambda: is_rolled_out(chat, 3), END_S)
    assert operator.is_running()
    assert "Traceback" not in operator.said()


def test_an_api_server_that_restarts_in_the_middle_of_a_delete_leaves_nothing_behind(chat: Load, operator: Process):
    before = {body["metadata"]["uid"] for body in engines(chat)}
    chat.api.call("DELETE", f"{chat.objects}/chat", {"propagationPolicy": "Background"})
    kill_api_server()
    chat.create([load_object("chat", prefill=ENGINES, decode=ENGINES, ready_after_s=POD_S)])
    # Kubernetes' collector of garbage can have missed the end of the object: then the operator removes what is left.
    wait_for(
        "the old engines are gone", lambda: not before & {body["metadata"]["uid"] for body in engines(chat)}, END_S
    )
    chat.wait_until_serving(1, END_S)
    assert len(engines(chat)) == 2 * ENGINES


def test_a_webhook_that_is_down_keeps_no_rollout_from_ending(
    real: Cluster, chat: Load, operator: Process, tmp_path: Path
):
    with webhook(real, tmp_path, chat.namespace) as admission:
        edit(chat, 4)
        admission.process.stop(signal.SIGKILL)
        with pytest.raises(AssertionError, match="failed calling webhook"):
            edit(chat, 5)
        # What the operator itself writes needs no admission.
        wait_for("the rollout has ended", lambda: is_rolled_out(chat, 4), END_S)


def lose(load: Load, gone: str) -> None:
    """Take a node and its pods away, as Kubernetes' own collector of such pods does after most of a minute."""
    lost = [pod["metadata"]["name"] for pod in load.api.items(load.pods) if pod["spec"].get("nodeName") == gone]
    load.api.call("DELETE", f"/api/v1/nodes/{gone}")
    for pod in lost:
        load.api.call("DELETE", f"{load.pods}/{pod}", {"gracePeriodSeconds": 0})


@pytest.fixture
def spare_node(real: Cluster, load: Load) -> Iterator[None]:
    """Afterwards there are as many nodes as before: a test takes one away."""
    yield
    there = {body["metadata"]["name"] for body in load.api.items("/api/v1/nodes")}
    for name in set(NODES) - there:
        load.api.call("POST", "/api/v1/nodes", node(name))
        wait_for(f"{name} is ready", lambda name=name: is_ready(load.api.call("GET", f"/api/v1/nodes/{name}")))


def test_a_node_that_is_gone_is_in_the_status_and_its_engines_are_made_elsewhere(
    spare_node: None, chat: Load, operator: Process
):
    said: list[Body] = []
    gone = engines(chat)[0]["spec"]["nodeName"]
    with chat.api.watch(chat.objects, lambda seen: said.append(seen.body)):
        lose(chat, gone)
        wait_for("it is said", lambda: any(not is_ready(body) for body in said), 30)
        wait_for("it is Ready again", lambda: is_ready(said[-1]), END_S)
    assert len(engines(chat)) == 2 * ENGINES
    assert gone not in {pod["spec"]["nodeName"] for pod in engines(chat)}


def test_a_node_that_is_gone_in_the_middle_of_a_rollout_delays_it_only(spare_node: None, chat: Load, operator: Process):
    old = {revision_of(pod) for pod in engines(chat)}
    gone = engines(chat)[0]["spec"]["nodeName"]
    with following(chat) as story:
        edit(chat, 6)
        wait_for("the new revision is known", lambda: update_revision(chat) not in (None, *old))
        new = update_revision(chat)
        assert new is not None
        story.wait("a new engine is ready", is_about("Pod", "decode", "is ready", new))
        # Engines of both revisions may be on it, and old ones are left either way.
        lose(chat, gone)
        wait_for("the rollout has ended", lambda: is_rolled_out(chat, 6), END_S)
    assert gone not in {pod["spec"]["nodeName"] for pod in engines(chat)}
    assert {revision_of(body) for body in chat.api.items(chat.deployments)} == {new}
