"""Engines that span several pods, with LeaderWorkerSet's real controller, and in a cluster without it.

One object goes through all of it, in the order of the tests: waiting for LeaderWorkerSet, its installation while the
controller runs, scaling, a pod that dies, and the feature turned off.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dcp_operator.names import ANNOTATION_GROUP_RESTARTS
from tests.support.cluster import Cluster
from tests.support.leader_worker_sets import leader_worker_sets
from tests.support.operator_process import (
    Process,
    apply_as_user,
    conditions,
    stand_in,
    wait_for,
)

# The first run builds LeaderWorkerSet's controller.
pytestmark = pytest.mark.timeout(900)

NAME = "wide"
BACKOFF = {"baseDelaySeconds": 2, "maxDelaySeconds": 600}
#: Where pods of a group meet: in a folder of the node, because the local cluster has no DNS.
MEET = "/meet"


class Wanted:
    """The object. `meet` is a folder of this machine, which is the node, too."""

    def __init__(self, meet: Path) -> None:
        self._meet = meet

    def __call__(self, *, nodes: int | None = 2, engines: int = 1) -> dict[str, Any]:
        multinode = {} if nodes is None else {"multinode": {"nodeCount": nodes, "restartBackoff": BACKOFF}}
        manifest = stand_in(NAME, decode={"replicas": engines, **multinode})
        pod = manifest["spec"]["decode"]["template"]["spec"]
        pod["volumes"] = [{"name": "meet", "hostPath": {"path": str(self._meet)}}]
        main = pod["containers"][0]
        main["volumeMounts"] = [{"name": "meet", "mountPath": MEET}]
        main["env"] = [*main["env"], {"name": "STAND_IN_MEET", "value": MEET}]
        # Without DNS a pod can't ask its leader whether there is something to wait for.
        main["lifecycle"] = {"preStop": {"sleep": {"seconds": 1}}}
        return manifest


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    meet = tmp_path_factory.mktemp("meet")
    # Pods are other users.
    meet.chmod(0o777)
    return Wanted(meet)


@pytest.fixture(scope="module")
def later() -> Iterator[ExitStack]:
    """What a test of the module begins and the following ones need."""
    with ExitStack() as stack:
        yield stack


def get(real: Cluster, namespace: str) -> dict[str, Any]:
    return real.get("dcpd", NAME, "-n", namespace)


def items(real: Cluster, namespace: str, kinds: str, role: str) -> list[dict[str, Any]]:
    found = real.get(kinds, "-n", namespace, "-l", f"dcpdisagg.io/name={NAME},dcpdisagg.io/role={role}")["items"]
    return [item for item in found if "deletionTimestamp" not in item["metadata"]]


def wait_until_ready(real: Cluster, namespace: str, operator: Process) -> None:
    def is_ready() -> bool:
        body = get(real, namespace)
        said = conditions(body).get("Ready", {})
        return said.get("status") == "True" and said["observedGeneration"] == body["metadata"]["generation"]

    try:
        wait_for("the object is ready", is_ready, 120)
    except AssertionError as error:
        said = json.dumps(conditions(get(real, namespace)), indent=1)
        raise AssertionError(f"{error}\n{said}\n{operator.said()[-4000:]}") from None


def test_without_leader_worker_set_a_condition_says_how_to_get_it(
    real: Cluster, namespace: str, operator: Process, wanted: Wanted
):
    apply_as_user(real, namespace, wanted())
    said = wait_for(
        "the object says what it lacks",
        lambda: (
            (found := conditions(get(real, namespace)).get("Ready", {})).get("reason") == "GroupsUnavailable" and found
        ),
    )
    assert said["status"] == "False"
    assert "needs LeaderWorkerSet, which this cluster doesn't have. Install" in said["message"]
    wait_for("the other role has its engine", lambda: items(real, namespace, "pods", "prefill"))
    assert operator.is_running()


def test_it_goes_on_once_leader_worker_set_is_installed(
    real: Cluster, namespace: str, operator: Process, later: ExitStack, tmp_path_factory: pytest.TempPathFactory
):
    later.enter_context(leader_worker_sets(real, tmp_path_factory.mktemp("lws")))
    wait_until_ready(real, namespace, operator)
    (group,) = items(real, namespace, "leaderworkersets", "decode")
    assert group["spec"]["leaderWorkerTemplate"]["size"] == 2
    (leader,), (worker,) = items(real, namespace, "pods", "decode"), items(real, namespace, "pods", "decode-worker")
    counts = get(real, namespace)["status"]["decode"]
    assert (counts["replicas"], counts["readyReplicas"], counts["updatedReplicas"]) == (1, 1, 1)
    arguments = {pod["metadata"]["name"]: pod["spec"]["containers"][0]["args"] for pod in (leader, worker)}
    assert "--node-rank=0" in arguments[leader["metadata"]["name"]]
    assert "--headless" in arguments[worker["metadata"]["name"]]
    # What the arguments refer to is there, in front of what refers to it.
    variables = {each["name"]: each.get("value") for each in worker["spec"]["containers"][0]["env"]}
    assert variables["LWS_WORKER_INDEX"] == "1"
    assert variables["LWS_LEADER_ADDRESS"] == f"{leader['metadata']['name']}.{group['metadata']['name']}.{namespace}"


def test_groups_are_scaled_as_engines(real: Cluster, namespace: str, operator: Process, wanted: Wanted):
    apply_as_user(real, namespace, wanted(engines=2))
    wait_until_ready(real, namespace, operator)
    assert get(real, namespace)["status"]["decode"]["readyReplicas"] == 2
    assert len(items(real, namespace, "pods", "decode-worker")) == 2
    assert len(items(real, namespace, "leaderworkersets", "decode")) == 1, "a scale makes no revision"
    apply_as_user(real, namespace, wanted())
    wait_until_ready(real, namespace, operator)
    wait_for("one group is left", lambda: len(items(real, namespace, "pods", "decode-worker")) == 1)


def test_a_group_of_which_a_pod_dies_is_made_anew_after_a_pause(real: Cluster, namespace: str, operator: Process):
    (before,) = items(real, namespace, "pods", "decode")
    (worker,) = items(real, namespace, "pods", "decode-worker")
    real.kubectl("delete", "pod", worker["metadata"]["name"], "-n", namespace, "--grace-period=1")

    def successor() -> dict[str, Any] | None:
        found = items(real, namespace, "pods", "decode")
        return found[0] if found and found[0]["metadata"]["uid"] != before["metadata"]["uid"] else None

    try:
        wait_for("the leader has a successor", successor, 60)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{operator.said()[-4000:]}") from None
    wait_until_ready(real, namespace, operator)
    (group,) = items(real, namespace, "leaderworkersets", "decode")
    record = json.loads(group["metadata"]["annotations"][ANNOTATION_GROUP_RESTARTS])
    assert record["0"]["times"] == 1
    events = real.get("events", "-n", namespace)["items"]
    (said,) = [event["message"] for event in events if event["reason"] == "GroupRecreated"]
    assert "is made anew, time 1 in a row: " in said


def test_without_multinode_the_group_goes_and_one_pod_takes_over(
    real: Cluster, namespace: str, operator: Process, wanted: Wanted
):
    apply_as_user(real, namespace, wanted(nodes=None))
    wait_until_ready(real, namespace, operator)
    wait_for("the group is gone", lambda: not items(real, namespace, "leaderworkersets", "decode"))
    assert len(items(real, namespace, "deployments", "decode")) == 1
    wait_for("its pods are gone", lambda: not items(real, namespace, "pods", "decode-worker"))


def test_the_controller_did_all_this_without_a_restart(operator: Process, later: ExitStack):
    assert operator.is_running()
    assert operator.said().count("watching objects=") == 1
    assert "Traceback" not in operator.said()
    later.close()
