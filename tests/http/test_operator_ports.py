"""The controller's ports over real sockets: probes that a hanging loop can't keep silent, and its metrics."""

import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dcp_operator import metrics
from dcp_operator.environment import SettingError
from dcp_operator.health import Health
from dcp_operator.metrics import DESCRIBED, ObjectFacts
from dcp_operator.reasons import Reason
from dcp_operator.side_server import Answer, SideServer, words
from devcluster.reference_pages import operator_metrics_page
from tests.support.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
#: A controller with an API server in memory: the ports and the loop are real. What stands on its standard input runs in
#: its loop.
CONTROLLER = """
import asyncio, sys, threading, time
from dcp_operator import health
from dcp_operator.controller import Environment, open_ports
from dcp_operator.health import Health
from dcp_operator.reconciler import Reconciler
from dcp_operator.target import Operator
from tests.support.objects import owner
from tests.support.simulated_api import SimulatedApi

health.LOOP_STUCK_S = 1.0

async def main():
    api = SimulatedApi()
    api.put(owner())
    reconciler = Reconciler(
        api, Operator("acme/operator:1"), now=lambda: "2026-01-01T00:00:00Z", fresh_key=lambda: "a2V5"
    )
    alive = Health(reconciler.problems)
    open_ports(Environment(Operator("acme/operator:1"), (), PORT, METRICS), reconciler, alive)
    beating = asyncio.create_task(alive.keep_beating())
    loop, lines = asyncio.get_running_loop(), asyncio.Queue()

    def read():
        for line in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, line)

    threading.Thread(target=read, daemon=True).start()
    print("open", flush=True)
    while True:
        line = await lines.get()
        if line.startswith("await "):
            await eval(line[6:])
        else:
            exec(line)
        print("done", flush=True)

asyncio.run(main())
"""


class Controller:
    """The process, its ports, and what is said to it."""

    def __init__(self, process: subprocess.Popen[str], port: int, metrics_port: int) -> None:
        self.process = process
        self.port = port
        self.metrics_port = metrics_port

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def probe(self, path: str) -> tuple[int, str]:
        return get(f"http://127.0.0.1:{self.port}{path}")

    def metrics(self) -> str:
        status, page = get(f"http://127.0.0.1:{self.metrics_port}/metrics")
        assert status == 200
        return page


@contextmanager
def controller() -> Iterator[Controller]:
    port, metrics_port = free_ports(2)
    code = CONTROLLER.replace("PORT", str(port)).replace("METRICS", str(metrics_port))
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = Controller(process, port, metrics_port)
    try:
        assert found.heard() == "open"
        yield found
    finally:
        process.kill()
        process.communicate()


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def until(condition, timeout_s: float = 60.0) -> None:
    waiting = threading.Event()
    for _ in range(int(timeout_s / 0.1)):
        if condition():
            return
        waiting.wait(0.1)
    pytest.fail("not within the time")


def test_a_blocked_loop_fails_the_probe_and_one_that_goes_on_passes_it_again():
    with controller() as found:
        assert found.probe("/healthz") == (200, "ok\n")
        found.tell("time.sleep(5)")
        until(lambda: found.probe("/healthz")[0] == 503)
        status, said = found.probe("/healthz")
        assert status == 200 or "the event loop has not run for" in said
        assert "dcp_operator_loop_lag_seconds" in found.metrics(), "scrapes are answered meanwhile, too"
        assert found.heard() == "done"
        until(lambda: found.probe("/healthz") == (200, "ok\n"))


def test_readiness_waits_until_everything_has_been_listed():
    with controller() as found:
        assert found.probe("/readyz") == (503, "not everything has been listed yet\n")
        found.tell("await reconciler.start()")
        assert found.heard() == "done"
        assert found.probe("/readyz") == (200, "ok\n")
        until(lambda: 'dcp_operator_objects{condition="Ready",reason="PodsPending"' in found.metrics())


def test_a_task_that_should_run_for_ever_and_has_ended_fails_the_probe():
    with controller() as found:
        found.tell("reconciler.lists._resync_forever = lambda: asyncio.sleep(0)")
        assert found.heard() == "done"
        found.tell("await reconciler.start()")
        assert found.heard() == "done"
        until(lambda: found.probe("/healthz") == (503, "the comparison with lists has ended\n"))


def test_a_path_that_is_not_there_and_a_client_that_sends_garbage_are_answered():
    server = SideServer(0, {"/healthz": lambda: words([])}, host="127.0.0.1")
    try:
        assert get(f"http://127.0.0.1:{server.port}/nothing")[0] == 404
        assert get(f"http://127.0.0.1:{server.port}/healthz?verbose=1") == (200, "ok\n")
    finally:
        server.close()


def test_a_port_that_is_taken_is_named():
    server = SideServer(0, {}, host="127.0.0.1")
    try:
        with pytest.raises(SettingError, match=f"port {server.port} can't be opened: Address already in use"):
            SideServer(server.port, {}, host="127.0.0.1")
    finally:
        server.close()


def test_a_loop_that_has_not_begun_is_not_called_stuck():
    now_s = 0.0
    health = Health(lambda: ["a problem"], clock=lambda: now_s)
    now_s = 1000.0
    assert health.problems() == ["a problem"]


def families(page: str) -> dict[str, str]:
    """Return the kind of each metric on a page, by its name as the reference lists it."""
    found = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    # A counter's creation time is a metric of its own on the page.
    names = {name: kind for name, kind in found.items() if not name.endswith("_created")}
    return {name: kind for name, kind in names.items() if not name.startswith("process_")}


@pytest.mark.parametrize("process", ["controller", "webhook"])
def test_every_metric_is_on_the_page_and_in_the_reference_and_no_other(process: str):
    registry = metrics.CONTROLLER if process == "controller" else metrics.WEBHOOK
    server = SideServer(0, {"/metrics": lambda: Answer(200, metrics.page(registry))}, host="127.0.0.1")
    try:
        shown = families(get(f"http://127.0.0.1:{server.port}/metrics")[1])
    finally:
        server.close()
    assert shown == {each.name: each.kind for each in DESCRIBED if each.process == process}
    reference = operator_metrics_page()
    assert (ROOT / "docs/reference/operator-metrics.md").read_text() == reference
    assert all(f"| `{name}` | {kind} |" in reference for name, kind in shown.items())


def test_the_page_tells_what_objects_say():
    key = ("metrics-test", "chat")
    status = {
        "conditions": [{"type": "Ready", "status": "False", "reason": "ImagePullFailed"}],
        "decode": {"replicas": 3, "readyReplicas": 2, "updatedReplicas": 1, "scheduledReplicas": 3},
        "rollout": {"revisions": [{"revision": "0a", "share": "50%"}]},
    }
    metrics.OBJECTS.facts[key] = ObjectFacts(status, {"decode": 2}, {"decode": {"asked": 9, "max": 4}})
    try:
        page = metrics.page(metrics.CONTROLLER).decode()
    finally:
        del metrics.OBJECTS.facts[key]
    labels = 'name="chat",namespace="metrics-test"'
    for line in (
        'dcp_operator_objects{condition="Ready",reason="ImagePullFailed",status="False"} 1.0',
        f'dcp_operator_role_replicas{{count="ready",{labels},role="decode"}} 2.0',
        f'dcp_operator_role_replicas{{count="wanted",{labels},role="decode"}} 2.0',
        f'dcp_operator_rollout_share{{{labels},revision="0a"}} 0.5',
        f'dcp_operator_scaler_replicas{{count="max",{labels},role="decode"}} 4.0',
    ):
        assert line in page
    assert 'namespace="metrics-test"' not in metrics.page(metrics.CONTROLLER).decode()


@pytest.mark.parametrize(
    ("path", "resource"),
    [
        ("/api/v1/namespaces/models/pods/p", "pods"),
        ("/api/v1/namespaces/models/events", "events"),
        ("/apis/apps/v1/namespaces/models/deployments/d/scale", "deployments/scale"),
        ("/apis/dcpdisagg.io/v1alpha1/namespaces/m/dcpdisaggdeployments/c/status", "dcpdisaggdeployments/status"),
        ("/apis/apps/v1/deployments", "deployments"),
        ("/apis/dcpdisagg.io/v1alpha1", ""),
    ],
)
def test_a_request_is_counted_for_the_resource_in_its_path(path: str, resource: str):
    assert metrics.resource_in(path) == resource


def value(name: str, **labels: str) -> float:
    return metrics.CONTROLLER.get_sample_value(name, labels) or 0.0


def test_writes_and_refusals_are_counted_and_an_object_that_is_not_there_is_no_error():
    path = "/api/v1/namespaces/models/services/s"
    writes = value("dcp_operator_writes_total", resource="services", verb="PATCH")
    missing = value("dcp_operator_api_errors_total", verb="GET", code="404")
    refused = value("dcp_operator_api_errors_total", verb="PATCH", code="403")
    for method, status in (("PATCH", 200), ("PATCH", 403), ("GET", 404), ("GET", 200)):
        metrics.request_made(method, path, status)
    assert value("dcp_operator_writes_total", resource="services", verb="PATCH") == writes + 2
    assert value("dcp_operator_api_errors_total", verb="GET", code="404") == missing
    assert value("dcp_operator_api_errors_total", verb="PATCH", code="403") == refused + 1


def test_a_check_of_the_transfer_is_counted_by_its_reason():
    before = value("dcp_operator_transfer_checks_total", reason="TransferFailed")
    metrics.canary_ended(Reason.TRANSFER_FAILED, 0.5)
    assert value("dcp_operator_transfer_checks_total", reason="TransferFailed") == before + 1
