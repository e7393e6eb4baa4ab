"""How pods go on the real node: engines wait for what they hold, the least loaded go first, budgets and policies."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dcp_operator.build.stopping import SETTLE_S
from dcp_operator.load import COST
from tests.support.cluster import Cluster
from tests.support.operator_process import (
    Process,
    apply_as_user,
    conditions,
    stand_in,
    wait_for,
)
from tests.support.stand_ins import call, complete, metrics, tell

READY_S = 90.0


@pytest.fixture(scope="module")
def objects(real: Cluster, namespace: str, operator: Process) -> None:
    """Both objects of this module, which start together."""
    short = {"protocol": "tcp", "extraConfig": {"lease_s": 3}}
    apply_as_user(real, namespace, of_three())
    apply_as_user(real, namespace, stand_in("short", drainTimeoutSeconds=1, kvConnector=short, transferCheck=NO_CHECK))


@pytest.fixture
def chat(real: Cluster, namespace: str, operator: Process, objects: None) -> str:
    """An object with three prefill engines, all ready, that hold nothing."""
    wait_until_ready(real, namespace, "chat", operator)
    for pod in engines(real, namespace, "chat"):
        forget(real, namespace, pod)
    return "chat"


#: Its prompts would run in the engines whose requests are counted here.
NO_CHECK = {"enabled": False}


def of_three(**changes: Any) -> dict[str, Any]:
    return stand_in("chat", prefill={"replicas": 3}, transferCheck=NO_CHECK, **changes)


def wait_until_ready(real: Cluster, namespace: str, name: str, operator: Process) -> None:
    def is_ready() -> bool:
        body = real.get("dcpd", name, "-n", namespace)
        said = conditions(body).get("Ready", {})
        return said.get("status") == "True" and said["observedGeneration"] == body["metadata"]["generation"]

    try:
        wait_for(f"{name} is ready", is_ready, READY_S)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{operator.said()[-3000:]}") from None


def pods(real: Cluster, namespace: str, name: str, role: str = "prefill") -> dict[str, dict]:
    selector = f"dcpdisagg.io/name={name},dcpdisagg.io/role={role}"
    return {item["metadata"]["name"]: item for item in real.get("pods", "-n", namespace, "-l", selector)["items"]}


def engines(real: Cluster, namespace: str, name: str, role: str = "prefill") -> list[str]:
    """Pods of a role that stay."""
    return sorted(pod for pod, body in pods(real, namespace, name, role).items() if not is_going(body))


def is_going(body: dict) -> bool:
    return "deletionTimestamp" in body["metadata"]


def pin(real: Cluster, namespace: str, pod: str, count: int = 1) -> None:
    """Have a prefill engine compute prompts that no decode engine fetches."""
    address = real.get("pod", pod, "-n", namespace)["status"]["podIP"]
    for _ in range(count):
        asked = {"model": "chat", "prompt": "hello", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        call(f"http://{address}:8000/v1/completions", asked)
    assert metrics(real, namespace, pod)["vllm:dcp_kv_pinned_requests"] == count


def forget(real: Cluster, namespace: str, pod: str) -> None:
    """Have a prefill engine give up what it holds."""
    tell(real, namespace, pod, lease_s=0.0)
    assert metrics(real, namespace, pod)["vllm:dcp_kv_pinned_requests"] == 0
    tell(real, namespace, pod, lease_s=600.0)


def evict(real: Cluster, namespace: str, pod: str) -> None:
    """Evict as `kubectl drain` does. Raises AssertionError with the API server's words where it refuses."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
    real.kubectl("create", "--raw", path, "-f", "-", input=json.dumps(body))


def test_an_engine_with_kv_of_others_stays_until_it_is_fetched_and_gets_no_request_meanwhile(
    real: Cluster, namespace: str, chat: str, operator: Process
):
    holding, idle, third = engines(real, namespace, chat)
    pin(real, namespace, holding)
    address = real.get("service", chat, "-n", namespace)["spec"]["clusterIP"]
    budget = ("pdb", f"{chat}-prefill", "-n", namespace)
    wait_for("one engine may go", lambda: real.get(*budget)["status"].get("disruptionsAllowed") == 1, 20)
    with ThreadPoolExecutor(1) as pool:
        log = pool.submit(real.kubectl, "logs", "-f", holding, "-c", "main", "-n", namespace, timeout_s=120)
        evict(real, namespace, holding)
        with pytest.raises(AssertionError, match="disruption budget"):
            evict(real, namespace, third)
        start = time.monotonic()
        # Not asked for by an eviction, which would be refused: it goes without having anything to wait for.
        real.kubectl("delete", "pod", idle, "-n", namespace, "--wait=false")
        late: list[tuple[float, str]] = []
        while idle in pods(real, namespace, chat):
            assert time.monotonic() - start < READY_S
            asked_s = time.monotonic() - start
            prefill = complete(address).prefill
            assert prefill is not None
            if prefill["pod"] in (holding, idle):
                late.append((asked_s, prefill["pod"]))
        # A router learns of a deletion by its watch; for so long an engine that goes waits whatever happens.
        assert [each for each in late if each[0] > SETTLE_S] == []
        (status,) = pods(real, namespace, chat)[holding]["status"]["containerStatuses"]
        assert "running" in status["state"], "the other one is gone, and this one holds KV"
        assert metrics(real, namespace, holding)["vllm:dcp_kv_pinned_requests"] == 1
        tell(real, namespace, holding, lease_s=0.0)
        wait_for("it goes", lambda: holding not in pods(real, namespace, chat), 60)
        said = log.result()
    assert "requests whose KV is held: 1 (" in said
    assert said.rstrip().endswith("no request runs and no KV is held")


def test_an_engine_whose_kv_nobody_fetches_goes_at_the_deadline(
    real: Cluster, namespace: str, operator: Process, objects: None
):
    wait_until_ready(real, namespace, "short", operator)
    (pod,) = engines(real, namespace, "short")
    tell(real, namespace, pod, lease_s=600.0)
    pin(real, namespace, pod)
    with ThreadPoolExecutor(1) as pool:
        log = pool.submit(real.kubectl, "logs", "-f", pod, "-c", "main", "-n", namespace, timeout_s=120)
        real.kubectl("delete", "pod", pod, "-n", namespace, "--wait=false")
        wait_for("it goes", lambda: pod not in pods(real, namespace, "short"), 60)
        said = log.result()
    # 5 s until routers know it, then the lease of 3 s.
    assert "s of at most 8 s)" in said
    assert said.rstrip().endswith("the time is over; requests running or waiting: 0, requests whose KV is held: 1")


def test_the_least_loaded_engine_goes_when_a_role_gets_smaller(
    real: Cluster, namespace: str, chat: str, operator: Process
):
    busy, _, third = engines(real, namespace, chat)
    pin(real, namespace, busy, 2)
    pin(real, namespace, third, 1)
    manifest = of_three()
    manifest["spec"]["prefill"]["replicas"] = 2
    apply_as_user(real, namespace, manifest)
    wait_for("one of them goes", lambda: len(engines(real, namespace, chat)) == 2, 30)
    assert engines(real, namespace, chat) == sorted([busy, third])
    annotations = pods(real, namespace, chat)[busy]["metadata"]["annotations"]
    assert annotations[COST] == "2"
    manifest["spec"]["prefill"]["replicas"] = 1
    apply_as_user(real, namespace, manifest)
    wait_for("another goes", lambda: engines(real, namespace, chat) == [busy], 30)
    # It goes as soon as it holds nothing, and is not asked whether that is so: it may have gone by then.
    tell(real, namespace, third, lease_s=0.0)
    apply_as_user(real, namespace, of_three())


def test_a_router_that_goes_takes_requests_for_a_while_and_finishes_those_that_it_has(
    real: Cluster, namespace: str, chat: str, operator: Process
):
    (pod,) = engines(real, namespace, chat, "router")
    (decode,) = engines(real, namespace, chat, "decode")
    address = f"{real.get('pod', pod, '-n', namespace)['status']['podIP']}:8080"
    # Longer than it takes requests: it has this one when it is told to stop.
    tell(real, namespace, decode, latency_s=9.0)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(complete, address, timeout_s=60)
        wait_for("it runs", lambda: metrics(real, namespace, decode)["vllm:num_requests_running"] == 1, 20)
        real.kubectl("delete", "pod", pod, "-n", namespace, "--wait=false")
        late = pool.submit(complete, address, timeout_s=60)
        assert running.result().recomputed is None
        assert late.result().recomputed is None, "who still has its address is answered"
    tell(real, namespace, decode, latency_s=0.0)
    wait_for("it goes", lambda: pod not in pods(real, namespace, chat, "router"), 30)


FEATURES = {
    "networkPolicy": ({"networkPolicy": {"enabled": False}}, ("networkpolicy/chat-engines",)),
    "disruptionBudget": ({"prefill": {"disruptionBudget": {"enabled": False}}}, ("poddisruptionbudget/chat-prefill",)),
    "router": (
        {"router": {"replicas": 0}},
        ("service/chat", "serviceaccount/chat-router", "role/chat-router", "rolebinding/chat-router"),
    ),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_turning_a_feature_off_deletes_its_children_and_turning_it_on_brings_them_back(
    real: Cluster, namespace: str, chat: str, operator: Process, feature: str
):
    off, owned = FEATURES[feature]
    kinds = ",".join(child.partition("/")[0] for child in owned)

    def there() -> set[str]:
        listed = real.get(kinds, "-n", namespace, "-l", "dcpdisagg.io/name=chat")["items"]
        return {f"{item['kind'].lower()}/{item['metadata']['name']}" for item in listed} & set(owned)

    def routers() -> int:
        return len(pods(real, namespace, chat, "router"))

    wait_for("they are there", lambda: there() == set(owned), 20)
    manifest = of_three()
    for field, value in off.items():
        manifest["spec"][field] = {**manifest["spec"].get(field, {}), **value}
    before = set(engines(real, namespace, chat))
    apply_as_user(real, namespace, manifest)
    wait_for("they are gone", lambda: there() == set() and routers() == (0 if feature == "router" else 1), 40)
    apply_as_user(real, namespace, of_three())
    wait_for("they are back", lambda: there() == set(owned), 20)
    assert set(engines(real, namespace, chat)) == before


def test_the_log_has_no_traceback(operator: Process):
    assert "Traceback" not in operator.said()
