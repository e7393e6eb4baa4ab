"""Engines that span several pods, with LeaderWorkerSet's real controller, and in a cluster without it.

One object goes through most of it, in the order of the tests: waiting for LeaderWorkerSet, its installation while the
controller runs, scaling, a pod that dies, and the feature turned off. Another one rolls out and drains meanwhile.
"""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from dcp_operator.names import ANNOTATION_GROUP_RESTARTS
from devcluster.paths import this_cache
from tests.support.cluster import Cluster
from tests.support.cluster_watch import ApiServer
from tests.support.leader_worker_sets import leader_worker_sets
from tests.support.operator_process import (
    Process,
    apply_as_user,
    conditions,
    stand_in,
    wait_for,
)
from tests.support.rollout_watch import Witness, asked_all_the_time
from tests.support.stand_ins import complete, metrics, tell

# The first run builds LeaderWorkerSet's controller.
pytestmark = pytest.mark.timeout(900)

NAME = "wide"
BACKOFF = {"baseDelaySeconds": 2, "maxDelaySeconds": 600}
#: Where pods of a group meet: in a folder of the node, because the local cluster has no DNS.
MEET = "/meet"
#: The object that rolls out and drains: prefill engines, and decode engines of two pods each.
ROLLED, ROLLED_ENGINES = "rolled", (1, 2)
#: Longer than a pod takes to go that has nothing to wait for.
REQUEST_S = 12.0


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


class Rolled:
    """The object that rolls out, whose pods have the operator's own preStop hook.

    The hook of a group's worker asks the leader by its name. Without DNS that stands in the pods' file of hosts, which
    the test writes.
    """

    def __init__(self, wanted: Wanted, hosts: Path) -> None:
        self._wanted, self._hosts = wanted, hosts

    def __call__(self, seed: int) -> dict[str, Any]:
        manifest = self._wanted()
        manifest["metadata"]["name"] = ROLLED
        spec = manifest["spec"]
        pod = spec["decode"]["template"]["spec"]
        pod["volumes"].append({"name": "hosts", "hostPath": {"path": str(self._hosts), "type": "File"}})
        main = pod["containers"][0]
        main["volumeMounts"].append({"name": "hosts", "mountPath": "/etc/hosts", "readOnly": True})
        del main["lifecycle"]
        for role, count in zip(("prefill", "decode"), ROLLED_ENGINES, strict=True):
            spec[role] |= {"replicas": count, "extraArgs": [f"--seed={seed}"]}
        return manifest | {"spec": {**spec, "drainTimeoutSeconds": 30, "transferCheck": {"enabled": False}}}

    def resolve(self, real: Cluster, namespace: str, leaders: Mapping[str, str] = MappingProxyType({})) -> None:
        """Give the names of the object's leaders, and say where each is; the others are at an address without engine.

        `leaders` are addresses by a leader's name.
        """
        lines = ["127.0.0.1 localhost"]
        for group in items(real, namespace, "leaderworkersets", "decode", ROLLED):
            name = group["metadata"]["name"]
            for number in range(ROLLED_ENGINES[1] + 1):
                leader = f"{name}-{number}"
                lines.append(f"{leaders.get(leader, '127.0.0.1')} {leader}.{name}.{namespace}")
        # In place: the pods have mounted this very file.
        self._hosts.write_text("\n".join([*lines, ""]))


@pytest.fixture(scope="module")
def rolled(wanted: Wanted, tmp_path_factory: pytest.TempPathFactory) -> Rolled:
    folder = tmp_path_factory.mktemp("hosts")
    folder.chmod(0o755)
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    hosts.chmod(0o644)
    return Rolled(wanted, hosts)


@pytest.fixture(scope="module")
def later() -> Iterator[ExitStack]:
    """What a test of the module begins and the following ones need."""
    with ExitStack() as stack:
        yield stack


def get(real: Cluster, namespace: str, name: str = NAME) -> dict[str, Any]:
    return real.get("dcpd", name, "-n", namespace)


def items(real: Cluster, namespace: str, kinds: str, role: str, name: str = NAME) -> list[dict[str, Any]]:
    found = real.get(kinds, "-n", namespace, "-l", f"dcpdisagg.io/name={name},dcpdisagg.io/role={role}")["items"]
    return [item for item in found if "deletionTimestamp" not in item["metadata"]]


def wait_until_ready(real: Cluster, namespace: str, operator: Process, name: str = NAME) -> None:
    def is_ready() -> bool:
        body = get(real, namespace, name)
        said = conditions(body).get("Ready", {})
        return said.get("status") == "True" and said["observedGeneration"] == body["metadata"]["generation"]

    try:
        wait_for("the object is ready", is_ready, 120)
    except AssertionError as error:
        said = json.dumps(conditions(get(real, namespace, name)), indent=1)
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


def test_during_a_change_of_groups_capacity_surge_and_pairs_hold_and_no_request_fails(
    real: Cluster, namespace: str, operator: Process, rolled: Rolled
):
    apply_as_user(real, namespace, rolled(1))
    wait_until_ready(real, namespace, operator, ROLLED)
    rolled.resolve(real, namespace)
    old = get(real, namespace, ROLLED)["status"]["updateRevision"]
    witness = Witness(ROLLED, ROLLED_ENGINES)
    with (
        witness.watching(ApiServer(this_cache().cluster), namespace, groups=True),
        asked_all_the_time(real, namespace, ROLLED) as answers,
    ):
        apply_as_user(real, namespace, rolled(2))
        wait_for(
            "the new groups are made", lambda: len(items(real, namespace, "leaderworkersets", "decode", ROLLED)) == 2
        )
        rolled.resolve(real, namespace)
        wait_until_ready(real, namespace, operator, ROLLED)
    new = get(real, namespace, ROLLED)["status"]["updateRevision"]
    witness.judge()
    assert witness.most["decode"] == ROLLED_ENGINES[1] + 1, "groups were counted"
    # Every request went through one revision, and both revisions had their turn.
    assert set(answers) == {(old, old), (new, new)}
    (group,) = items(real, namespace, "leaderworkersets", "decode", ROLLED)
    assert group["metadata"]["labels"]["dcpdisagg.io/revision"] == new


def test_a_pod_of_a_group_that_is_to_go_stays_until_the_leader_has_no_request_left(
    real: Cluster, namespace: str, operator: Process, rolled: Rolled
):
    leader, *others = items(real, namespace, "pods", "decode", ROLLED)
    name, address = leader["metadata"]["name"], leader["status"]["podIP"]
    rolled.resolve(real, namespace, {name: address})
    tell(real, namespace, name, latency_s=REQUEST_S)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(complete, f"{address}:8000", model=ROLLED, timeout_s=90)
        wait_for("it runs", lambda: metrics(real, namespace, name)["vllm:num_requests_running"] == 1, 20)
        log = pool.submit(real.kubectl, "logs", "-f", f"{name}-1", "-c", "main", "-n", namespace, timeout_s=120)
        # As a node that is drained does it: the other pod of the group is evicted first.
        real.kubectl("delete", "pod", f"{name}-1", "-n", namespace, "--wait=false")
        assert running.result().decode["pod"] == name
        said = log.result()
    assert "requests running or waiting: 1, requests whose KV is held: 0 (0 s of at most" in said
    assert said.rstrip().endswith("no request runs and no KV is held")
    # Who asks for the leader from now on finds nobody: it goes too.
    rolled.resolve(real, namespace)

    def is_made_anew() -> bool:
        found = {pod["metadata"]["uid"] for pod in items(real, namespace, "pods", "decode", ROLLED)}
        return leader["metadata"]["uid"] not in found and len(found) == 1 + len(others)

    wait_for("the group is made anew", is_made_anew)
    real.kubectl("delete", "dcpd", ROLLED, "-n", namespace)


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
