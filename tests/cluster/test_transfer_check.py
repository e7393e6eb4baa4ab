"""The check of the KV transfer on the real cluster: each verdict in the condition, the event, the log and the metric.

Engines are stand-ins that speak the connector's counters; the router and everything of Kubernetes are real.
"""

import copy
import time
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError

import pytest

from tests.support.cluster import Cluster
from tests.support.operator_process import (
    STAND_IN,
    Process,
    apply_as_user,
    conditions,
    controller,
    stand_in,
    wait_for,
)
from tests.support.ports import free_port
from tests.support.stand_ins import complete, metrics, tell

READY_S = 120.0
#: Stand-ins with none of the connector's counters.
BARE = STAND_IN.replace("vllm:dcp_kv_", "vllm:other_")
#: Of a router's wait for an engine.
BOUND_S = 3
FITS = "block size: prefill has 32, decode has 64"


def bare() -> dict[str, Any]:
    """Decode's template with an engine that runs without the connector."""
    template = copy.deepcopy(stand_in()["spec"]["decode"]["template"])
    template["spec"]["containers"][0]["command"] = ["python", "-c", BARE]
    return {"template": template}


#: No pods at all.
EMPTY: dict[str, Any] = {"prefill": {"replicas": 0}, "decode": {"replicas": 0}, "router": {"replicas": 0}}
#: object -> (what makes it, status, reason, words of the message)
OBJECTS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "moves": ({}, "True", "Verified", "moved from prefill to decode"),
    "unasked": ({"prefill_told": {"transfer": "none"}}, "False", "Recomputed", "params_missing"),
    "refused": ({"decode_told": {"refuse": FITS}}, "False", "HandshakeRefused", FITS),
    "failing": ({"prefill_told": {"completions": "error"}}, "False", "TransferFailed", "HTTP 500"),
    "silent": (
        {"prefill_told": {"completions": "hang"}, "router": {"requestTimeoutSeconds": BOUND_S}},
        "False",
        "TransferFailed",
        "timed out",
    ),
    "bare": ({"decode": bare()}, "False", "NoKVConnector", "(decode) runs without the KV connector"),
    "off": (
        {**EMPTY, "transferCheck": {"enabled": False}},
        "Unknown",
        "Disabled",
        "spec.transferCheck.enabled is false",
    ),
}


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def operator(
    real: Cluster, namespace: str, metrics_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("controller")
    with controller(real, folder, namespace, DCP_METRICS_PORT=str(metrics_port)) as process:
        for name, (parts, *_) in OBJECTS.items():
            apply_as_user(real, namespace, stand_in(name, **parts))
        yield process


def verified(real: Cluster, namespace: str, name: str) -> dict[str, Any]:
    return conditions(real.get("dcpd", name, "-n", namespace)).get("KVTransferVerified", {})


def wait_until(real: Cluster, namespace: str, name: str, operator: Process, reason: str) -> dict[str, Any]:
    def said() -> dict[str, Any] | None:
        found = verified(real, namespace, name)
        return found if found.get("reason") == reason else None

    try:
        return wait_for(f"{name} is {reason}", said, READY_S)
    except AssertionError as error:
        now = conditions(real.get("dcpd", name, "-n", namespace))
        about = f"{now.get('Ready')}\n{now.get('KVTransferVerified')}"
        raise AssertionError(f"{error}\n{about}\n{operator.said()[-3000:]}") from None


@pytest.mark.parametrize("name", OBJECTS)
def test_the_verdict_is_in_the_condition_the_event_the_log_and_the_metric(
    real: Cluster, namespace: str, operator: Process, metrics_port: int, name: str
):
    _, status, reason, words = OBJECTS[name]
    said = wait_until(real, namespace, name, operator, reason)
    assert said["status"] == status
    assert words in said["message"]
    assert conditions(real.get("dcpd", name, "-n", namespace))["Ready"]["status"] == "True" or name == "off", (
        "the check changes nothing of Ready"
    )
    if status == "Unknown":
        return

    def is_recorded() -> bool:
        items = real.get("events", "-n", namespace)["items"]
        return any(item["reason"] == reason and item["involvedObject"]["name"] == name for item in items)

    wait_for("the event is recorded", is_recorded, 10)
    assert any(reason in line and f"{namespace}/{name}" in line for line in operator.said().splitlines())
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    assert f'dcp_operator_transfer_checks_total{{reason="{reason}"}}' in page


def test_a_request_fails_at_once_where_prefill_answers_500(real: Cluster, namespace: str, operator: Process):
    wait_until(real, namespace, "failing", operator, "TransferFailed")
    service = real.get("service", "failing", "-n", namespace)["spec"]["clusterIP"]
    began = time.monotonic()
    with pytest.raises(HTTPError) as refused:
        complete(f"{service}:80", "one two", model="failing")
    assert refused.value.code == 500
    assert "Prefill" in refused.value.read().decode(), "the router says which side failed"
    assert time.monotonic() - began < 10


def test_a_request_ends_in_the_routers_time_where_prefill_is_healthy_and_never_answers(
    real: Cluster, namespace: str, operator: Process
):
    wait_until(real, namespace, "silent", operator, "TransferFailed")
    service = real.get("service", "silent", "-n", namespace)["spec"]["clusterIP"]
    began = time.monotonic()
    with pytest.raises(HTTPError) as refused:
        complete(f"{service}:80", "one two", model="silent", timeout_s=60)
    assert time.monotonic() - began >= BOUND_S
    assert refused.value.code == 500
    assert "Prefill request" in refused.value.read().decode(), "the router says which side is silent"
    ready = conditions(real.get("dcpd", "silent", "-n", namespace))["Ready"]
    assert ready["status"] == "True", "what its probes ask is answered"


def engines(real: Cluster, namespace: str, name: str, role: str) -> list[dict[str, Any]]:
    selector = f"dcpdisagg.io/name={name},dcpdisagg.io/role={role}"
    return real.get("pods", "-n", namespace, "-l", selector)["items"]


def test_a_verified_object_is_left_alone_and_users_requests_are_told_from_the_checks(
    real: Cluster, namespace: str, operator: Process, metrics_port: int
):
    wait_until(real, namespace, "moves", operator, "Verified")
    before = real.get("dcpd", "moves", "-n", namespace)
    decode = engines(real, namespace, "moves", "decode")[0]["metadata"]["name"]
    counted = metrics(real, namespace, decode)["vllm:prompt_tokens_total"]
    address = real.get("service", "moves", "-n", namespace)["spec"]["clusterIP"]
    assert complete(f"{address}:80", "one two three", model="moves").recomputed is None
    assert metrics(real, namespace, decode)["vllm:prompt_tokens_total"] == counted + 3
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    name = "dcp_operator_transfer_check_tokens_total{"
    (sent,) = [line for line in page.splitlines() if line.startswith(name) and '"moves"' in line]
    assert float(sent.rpartition(" ")[2]) == counted, "all other tokens were those of the checks"
    after = real.get("dcpd", "moves", "-n", namespace)
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


def test_an_engine_that_restarts_at_its_address_is_told_checked_again_and_requests_go_on(
    real: Cluster, namespace: str, operator: Process
):
    wait_until(real, namespace, "moves", operator, "Verified")
    before = real.get("dcpd", "moves", "-n", namespace)["status"]["transferCheck"]
    pod = engines(real, namespace, "moves", "prefill")[0]
    address = pod["status"]["podIP"]
    last = "RuntimeError: told to end by the test"
    tell(real, namespace, pod["metadata"]["name"], exit=last, crash_after_s=0.5)

    def restarted() -> dict[str, Any] | None:
        found = engines(real, namespace, "moves", "prefill")[0]
        status = found["status"]["containerStatuses"][0]
        return found if status["restartCount"] == 1 and status["ready"] else None

    after = wait_for("the container runs again", restarted, 60)
    assert (after["metadata"]["uid"], after["status"]["podIP"]) == (pod["metadata"]["uid"], address)

    def event() -> str | None:
        items = real.get("events", "-n", namespace)["items"]
        return next((item["message"] for item in items if item["reason"] == "EngineRestarted"), None)

    message = wait_for("the event is recorded", event, 20)
    assert pod["metadata"]["name"] in message
    assert last in message
    service = real.get("service", "moves", "-n", namespace)["spec"]["clusterIP"]

    def goes_on() -> bool:
        try:
            went = complete(f"{service}:80", "one two", model="moves")
        except OSError:
            return False
        return went.recomputed is None and went.prefill is not None

    wait_for("requests go through the restarted engine", goes_on, 60)

    def checked_again() -> bool:
        status = real.get("dcpd", "moves", "-n", namespace)["status"]
        return status.get("transferCheck", {}).get("engines") not in (None, before["engines"])

    wait_for("the transfer is checked again", checked_again, 90)
    assert verified(real, namespace, "moves")["reason"] == "Verified"


def test_a_restarted_controller_keeps_the_results_and_checks_nothing_again(
    real: Cluster, namespace: str, operator: Process
):
    wait_until(real, namespace, "moves", operator, "Verified")
    before = real.get("dcpd", "moves", "-n", namespace)["status"]
    said = operator.said().count(f"object={namespace}/moves reason=Verified")
    operator.stop()
    operator.start()
    apply_as_user(real, namespace, stand_in("later"))
    wait_until(real, namespace, "later", operator, "Verified")
    after = real.get("dcpd", "moves", "-n", namespace)["status"]
    assert after["transferCheck"] == before["transferCheck"]
    assert conditions({"status": after})["KVTransferVerified"] == conditions({"status": before})["KVTransferVerified"]
    assert operator.said().count(f"object={namespace}/moves reason=Verified") == said
