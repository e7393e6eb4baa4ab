"""Rollouts on the real API server and node, with stand-in engines and the real router."""

import signal
from collections.abc import Callable
from typing import Any

import pytest

from dcp_operator.client import Api
from dcp_operator.kinds import DEPLOYMENT
from devcluster.paths import this_cache
from tests.support.cluster import Cluster
from tests.support.cluster_watch import ApiServer
from tests.support.operator_process import (
    Process,
    apply_as_user,
    conditions,
    stand_in,
    wait_for,
)
from tests.support.rollout_watch import Witness, asked_all_the_time

READY_S = 120.0
WANTED = (3, 2)


@pytest.fixture(scope="module")
def api(real: Cluster) -> ApiServer:
    return ApiServer(this_cache().cluster)


def made_with(seed: int, told: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the object, three prefill and two decode engines; another seed is another revision of both roles."""
    arguments = [f"--seed={seed}"]
    return stand_in(
        "chat",
        prefill={"replicas": WANTED[0], "extraArgs": arguments},
        decode={"replicas": WANTED[1], "extraArgs": arguments},
        prefill_told=told,
        drainTimeoutSeconds=1,
        networkPolicy={"enabled": False},
        transferCheck={"enabled": False},
    )


def status(real: Cluster, namespace: str) -> dict[str, Any]:
    return real.get("dcpd", "chat", "-n", namespace)


def wait_until_ready(real: Cluster, namespace: str, operator: Process) -> str:
    """Wait until the present spec is rolled out and nothing else is left; return its revision."""

    def is_ready() -> bool:
        body = status(real, namespace)
        said = conditions(body).get("Ready", {})
        return said.get("status") == "True" and said["observedGeneration"] == body["metadata"]["generation"]

    try:
        wait_for("the object is ready", is_ready, READY_S)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{status(real, namespace)['status']}\n{operator.said()[-3000:]}") from None
    return status(real, namespace)["status"]["updateRevision"]


def pods(real: Cluster, namespace: str, revision: str) -> dict[str, str]:
    """Return the uids of a revision's engine pods by name."""
    selector = f"dcpdisagg.io/name=chat,dcpdisagg.io/revision={revision},dcpdisagg.io/role in (prefill,decode)"
    items = real.get("pods", "-n", namespace, "-l", selector)["items"]
    return {item["metadata"]["name"]: item["metadata"]["uid"] for item in items}


def deployments(real: Cluster, namespace: str) -> dict[str, int]:
    items = real.get("deployments", "-n", namespace, "-l", "dcpdisagg.io/name=chat")["items"]
    return {item["metadata"]["name"]: item["spec"]["replicas"] for item in items}


def test_during_a_change_of_both_roles_capacity_surge_and_pairs_hold_and_no_request_fails(
    real: Cluster, api: ApiServer, namespace: str, operator: Process
):
    apply_as_user(real, namespace, made_with(1))
    old = wait_until_ready(real, namespace, operator)
    witness = Witness("chat", WANTED)
    with witness.watching(api, namespace), asked_all_the_time(real, namespace, "chat") as answers:
        apply_as_user(real, namespace, made_with(2))
        wait_for("the change is seen", lambda: status(real, namespace)["status"]["updateRevision"] != old, 20)
        new = wait_until_ready(real, namespace, operator)
    witness.judge()
    # Every request went through one revision, and both revisions had their turn.
    assert set(answers) == {(old, old), (new, new)}
    assert set(deployments(real, namespace)) == {f"chat-{each}-{new}" for each in ("prefill", "decode", "router")}


def test_a_revert_in_the_middle_of_a_change_keeps_every_pod_that_serves(
    real: Cluster, api: ApiServer, namespace: str, operator: Process
):
    apply_as_user(real, namespace, made_with(2))
    old = wait_until_ready(real, namespace, operator)
    before = pods(real, namespace, old)
    witness = Witness("chat", WANTED)
    with witness.watching(api, namespace), asked_all_the_time(real, namespace, "chat") as answers:
        # Prefill never gets ready, as if it had been given an option that breaks it.
        apply_as_user(real, namespace, made_with(3, told={"unready": "told to be"}))
        wait_for("the change is seen", lambda: status(real, namespace)["status"]["updateRevision"] != old, 20)
        new = status(real, namespace)["status"]["updateRevision"]
        wait_for("its pods are there", lambda: len(pods(real, namespace, new)) == 2, 30)
        waits = wait_for("it says what it waits for", lambda: waiting(real, namespace), 20)
        assert f"of revision {new}" in waits
        apply_as_user(real, namespace, made_with(2))
        wait_for("the broken one is gone", lambda: not any(new in name for name in deployments(real, namespace)), 60)
        assert wait_until_ready(real, namespace, operator) == old
    witness.judge()
    assert pods(real, namespace, old) == before
    assert set(answers) == {(old, old)}


def waiting(real: Cluster, namespace: str) -> str | None:
    words = status(real, namespace)["status"].get("rollout", {}).get("waitingFor")
    return words if words is not None and "become ready" in words else None


def test_a_controller_that_is_killed_at_any_point_of_a_change_goes_on_and_ends_right(
    real: Cluster, api: ApiServer, namespace: str, operator: Process
):
    apply_as_user(real, namespace, made_with(2))
    old = wait_until_ready(real, namespace, operator)
    witness = Witness("chat", WANTED)
    with witness.watching(api, namespace), asked_all_the_time(real, namespace, "chat") as answers:
        apply_as_user(real, namespace, made_with(4))

        def replicas(revision: str, role: str) -> int | None:
            return deployments(real, namespace).get(f"chat-{role}-{revision}")

        def begun() -> bool:
            return any(name.startswith("chat-prefill-") and old not in name for name in deployments(real, namespace))

        points: list[tuple[str, Callable[[], bool]]] = [
            ("the new workloads are being made", begun),
            ("the first old engine goes", lambda: (replicas(old, "prefill") or 0) < WANTED[0]),
            ("the old routers go", lambda: replicas(old, "router") is None),
        ]
        for what, is_there in points:
            wait_for(what, is_there, READY_S, every_s=0.05)
            operator.stop(signal.SIGKILL)
            operator.start()
        new = wait_until_ready(real, namespace, operator)
    witness.judge()
    assert set(answers) == {(old, old), (new, new)}
    assert deployments(real, namespace) == {
        f"chat-prefill-{new}": WANTED[0],
        f"chat-decode-{new}": WANTED[1],
        f"chat-router-{new}": 1,
    }


def test_old_workloads_are_scaled_in_the_operators_name_and_never_another_of_their_name(
    real: Cluster, namespace: str, operator: Process, monkeypatch: pytest.MonkeyPatch
):
    name = next(iter(deployments(real, namespace)))
    # The client library reads KUBECONFIG once, when it is imported.
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(real.kubeconfig))
    client = Api()
    body = client.get(DEPLOYMENT, namespace, name)
    assert body is not None
    assert client.scale(DEPLOYMENT, namespace, name, "00000000-0000-0000-0000-000000000000", 7) is None
    assert client.scale(DEPLOYMENT, namespace, f"{name}-gone", body["metadata"]["uid"], 7) is None
    assert deployments(real, namespace)[name] == body["spec"]["replicas"]
    version = client.scale(DEPLOYMENT, namespace, name, body["metadata"]["uid"], body["spec"]["replicas"])
    assert version is not None
    client.close()
