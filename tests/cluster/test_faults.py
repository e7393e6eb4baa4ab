"""Faults of the cluster in the middle of a rollout and of a delete, on the real API server with pods on fake nodes.

The same faults at every single call are in tests/unit/test_faults.py; here is what only a real API server does.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dcp_operator import names
from devcluster.fake_nodes import fake_nodes
from devcluster.paths import this_cache
from tests.support.cluster import Cluster, cluster
from tests.support.cluster_faults import kill_api_server
from tests.support.cluster_watch import ApiServer, Seen
from tests.support.operator_load import Load, is_ready, load_object
from tests.support.operator_process import Process, controller, wait_for, webhook, without_release

ENGINES = 2
POD_S = 1.0
END_S = 90.0
#: Kubernetes' collector of garbage finds its way back after the API server was away: it looks every half a minute.
COLLECTED_S = 300.0
NODES = ("fault-0", "fault-1")
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
    with controller(real, tmp_path_factory.mktemp("operator"), load.namespace) as process:
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
    path, kind = f"{load.objects}/chat", "application/merge-patch+json"
    load.api.call("PATCH", path, {"spec": manifest["spec"]}, kind)


def engines(load: Load) -> list[Body]:
    pods = load.api.items(f"{load.pods}?labelSelector={names.LABEL_NAME}=chat")
    return [pod for pod in pods if pod["metadata"]["labels"].get(names.LABEL_ROLE) in ("prefill", "decode")]


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
    alive = {pod["metadata"]["uid"]: pod for pod in engines(load)}
    fewest: list[int] = []

    def count() -> None:
        for role in ("prefill", "decode"):
            ready = [pod for pod in alive.values() if pod["metadata"]["labels"][names.LABEL_ROLE] == role]
            fewest.append(sum(map(is_ready, ready)))

    def take(seen: Seen) -> None:
        metadata = seen.body["metadata"]
        if metadata["labels"].get(names.LABEL_ROLE) not in ("prefill", "decode"):
            return
        if seen.kind == "DELETED" or "deletionTimestamp" in metadata:
            alive.pop(metadata["uid"], None)
        else:
            alive[metadata["uid"]] = seen.body
        count()

    with load.api.watch(load.pods, take):
        yield
    assert min(fewest) >= wanted


def test_a_controller_that_is_killed_again_and_again_ends_its_rollout(chat: Load, operator: Process):
    with never_fewer(chat, ENGINES):
        edit(chat, 1)
        for _ in range(4):
            # Longer than a start takes, and not a multiple of what a step takes: the kills meet different steps.
            time.sleep(2.3)
            operator.stop(signal.SIGKILL)
            operator.start()
        wait_for("the rollout has ended", lambda: is_rolled_out(chat, 1), END_S)


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


def test_a_node_that_is_gone_is_in_the_status_and_its_engines_are_made_elsewhere(
    real: Cluster, chat: Load, operator: Process
):
    said: list[Body] = []
    gone = engines(chat)[0]["spec"]["nodeName"]
    lost = [pod["metadata"]["name"] for pod in chat.api.items(chat.pods) if pod["spec"]["nodeName"] == gone]
    with chat.api.watch(chat.objects, lambda seen: said.append(seen.body)):
        chat.api.call("DELETE", f"/api/v1/nodes/{gone}")
        # Kubernetes' own collector of such pods waits for most of a minute before it does the same.
        for pod in lost:
            chat.api.call("DELETE", f"{chat.pods}/{pod}", {"gracePeriodSeconds": 0})
        wait_for("it is said", lambda: any(not is_ready(body) for body in said), 30)
        wait_for("it is Ready again", lambda: is_ready(said[-1]), END_S)
    assert len(engines(chat)) == 2 * ENGINES
    assert gone not in {pod["spec"]["nodeName"] for pod in engines(chat)}
