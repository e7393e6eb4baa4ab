"""The operator's two processes, run from the checkout against the cluster's API server: tests of them need no image.

Both run as they would in their pods, except that they log in with the cluster's kubeconfig and that the API server
reaches the webhook at the address of the node's bridge.
"""

import base64
import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from devcluster.paths import this_cache
from devcluster.release import load_operator_image, operator_image
from devcluster.settings import GATEWAY
from tests.support.cluster import Cluster
from tests.support.ports import free_port
from tests.support.release import no_other_release

CHECKOUT = Path(__file__).resolve().parents[2]
CRDS = CHECKOUT / "crds"
#: Names of the definitions, that of the objects that users write first.
DEFINITIONS = ("dcpdisaggdeployments.dcpdisagg.io", "dcpdisaggrolescalers.dcpdisagg.io")
STAND_IN = (Path(__file__).parent / "stand_in_engine.py").read_text()
#: The operator's image holds a Python, the connector and the router: enough for stand-in engines too.
IMAGE = operator_image()


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float = 60.0, every_s: float = 0.2) -> Any:
    """Return the first true value of `condition`; fail with `what` after the timeout."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(every_s)


@dataclass
class Process:
    """One of the operator's processes."""

    name: str
    kubeconfig: Path
    log: Path
    environment: dict[str, str]
    _process: subprocess.Popen | None = field(default=None, repr=False)

    def start(self) -> None:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dcp_operator", self.name],
                env={**os.environ, **self.environment, "KUBECONFIG": str(self.kubeconfig)},
                cwd=CHECKOUT,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
            )

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End the process and return its exit status."""
        assert self._process is not None
        self._process.send_signal(how)
        try:
            return self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise AssertionError(f"{self.name} does not stop:\n{self.said()}") from None

    def send(self, number: signal.Signals) -> None:
        """Send a signal and wait for nothing, as to freeze the process and to let it go on."""
        assert self._process is not None
        self._process.send_signal(number)

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def said(self) -> str:
        return self.log.read_text()

    def memory_kib(self, which: str = "VmRSS") -> int:
        """Memory in use; with VmHWM the most that was."""
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith(which)).split()[1])

    def cpu_s(self) -> float:
        """Processor time used so far."""
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def running(process: Process, is_up: Callable[[], bool], timeout_s: float = 60.0) -> Iterator[Process]:
    """The process, once `is_up`; stopped afterwards."""
    process.start()
    try:
        wait_for(
            f"{process.name} is up",
            lambda: is_up() or (not process.is_running() and _fail(process)),
            timeout_s,
        )
        yield process
    finally:
        if process.is_running():
            process.stop()


def _fail(process: Process) -> bool:
    raise AssertionError(f"{process.name} ended:\n{process.said()}")


@contextmanager
def without_release(cluster: Cluster, *, image: bool = True) -> Iterator[Cluster]:
    """The cluster with the custom resource's definition and no operator in it but the tests' own."""
    with no_other_release():
        there = cluster.kubectl("get", "crd", "-o", "name")
        install_crd(cluster)
        if image:
            load_operator_image(this_cache(), lambda message: None)
        try:
            yield cluster
        finally:
            # Helm takes over no definition that it did not make: what the tests brought goes with them.
            brought = [name for name in DEFINITIONS if name not in there]
            if brought:
                cluster.kubectl("delete", "crd", *brought)


def is_served(cluster: Cluster, name: str) -> bool:
    """Whether the API server serves the kind of a definition."""
    return conditions(cluster.get("crd", name)).get("Established", {}).get("status") == "True"


def install_crd(cluster: Cluster) -> None:
    """Install or update the custom resource definitions, and wait until they are served."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", CRDS)
    for name in DEFINITIONS:
        wait_for(f"{name} is served", lambda name=name: is_served(cluster, name), 30)


@contextmanager
def controller(cluster: Cluster, folder: Path, *namespaces: str, **environment: str) -> Iterator[Process]:
    """The controller, looking after some namespaces only: other tests use the cluster too."""
    port = free_port()
    process = Process(
        "controller",
        cluster.kubeconfig,
        folder / "controller.log",
        {
            "DCP_OPERATOR_IMAGE": IMAGE,
            "DCP_OPERATOR_IMAGE_PULL_POLICY": "IfNotPresent",
            "DCP_WATCH_NAMESPACES": ",".join(namespaces),
            "DCP_HEALTH_PORT": str(port),
            **environment,
        },
    )
    with running(process, lambda: _answers(f"http://127.0.0.1:{port}/readyz")):
        yield process


@dataclass(frozen=True, slots=True)
class Webhook:
    """A running webhook and the certificate it began with."""

    process: Process
    folder: Path
    port: int

    @property
    def url(self) -> str:
        return f"https://{GATEWAY}:{self.port}"

    def served_certificate(self) -> str:
        """Return the certificate that a new connection gets, as PEM."""
        return ssl.get_server_certificate((GATEWAY, self.port))

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Send a request as the API server would; return status and body."""
        request = urllib.request.Request(f"{self.url}{path}", data=body, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=20, context=trusting(self.folder)) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


@contextmanager
def webhook(cluster: Cluster, folder: Path, *namespaces: str) -> Iterator[Webhook]:
    """The webhook, registered for some namespaces only."""
    make_certificate(folder)
    port = free_port()
    process = Process(
        "webhook",
        cluster.kubeconfig,
        folder / "webhook.log",
        {"DCP_WEBHOOK_CERT_DIR": str(folder), "DCP_WEBHOOK_PORT": str(port)},
    )
    url = f"https://{GATEWAY}:{port}"
    configuration = webhook_configuration(namespaces, f"{url}/validate", (folder / "tls.crt").read_bytes())
    with running(process, lambda: _answers(f"{url}/readyz", trusting(folder))):
        cluster.apply(configuration)
        # The API server reads the configuration some time after it was stored.
        wait_for("the API server asks the webhook", lambda: _is_asked(cluster, namespaces[0]))
        try:
            yield Webhook(process, folder, port)
        finally:
            cluster.kubectl("delete", "validatingwebhookconfiguration", configuration["metadata"]["name"])


def webhook_configuration(namespaces: tuple[str, ...], url: str, ca: bytes) -> dict[str, Any]:
    here = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": list(namespaces)}
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": f"dcp-test-{namespaces[0]}"},
        "webhooks": [
            {
                "name": "validate.dcpdisagg.io",
                "clientConfig": {"url": url, "caBundle": base64.b64encode(ca).decode()},
                "rules": [
                    {
                        "apiGroups": ["dcpdisagg.io"],
                        "apiVersions": ["v1alpha1"],
                        "resources": ["dcpdisaggdeployments"],
                        "operations": ["CREATE", "UPDATE"],
                        "scope": "Namespaced",
                    }
                ],
                "namespaceSelector": {"matchExpressions": [here]},
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "failurePolicy": "Fail",
                "timeoutSeconds": 10,
            }
        ],
    }


def make_certificate(folder: Path) -> None:
    """Write a new self-signed serving certificate, tls.crt and tls.key."""
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "30", "-subj", f"/CN=webhook-{time.time_ns()}", "-addext", f"subjectAltName=IP:{GATEWAY}"),
            *("-keyout", str(folder / "new.key"), "-out", str(folder / "new.crt")),
        ],
        check=True,
        capture_output=True,
    )
    (folder / "new.crt").replace(folder / "tls.crt")
    (folder / "new.key").replace(folder / "tls.key")


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "tls.crt"))


def stand_in(
    name: str = "chat",
    *,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    prefill_told: dict[str, Any] | None = None,
    decode_told: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Return an object whose engines are stand-ins: Ready within seconds, a few MiB each.

    `prefill` and `decode` replace fields of a role, `changes` fields of the spec. What stand-ins are `told` holds from
    their start (`stand_in_engine` lists it); `tests.support.stand_ins` talks to them when they run.
    """
    spec = {
        "model": {
            "uri": "hf://acme/tiny",
            "geometry": {"attention": "gqa", "attentionHeads": 4, "kvHeads": 1, "layers": 4, "maxModelLen": 1024},
        },
        "image": IMAGE,
        "accelerator": {"resourceName": "cpu"},
        "kvConnector": {"protocol": "tcp"},
        "prefill": {**_stand_in_role(prefill_told), "parallelism": {"tensor": 1}, **(prefill or {})},
        "decode": {
            **_stand_in_role(decode_told),
            "parallelism": {"tensor": 2, "decodeContext": 2},
            **(decode or {}),
        },
    }
    return {
        "apiVersion": "dcpdisagg.io/v1alpha1",
        "kind": "DCPDisaggDeployment",
        "metadata": {"name": name},
        "spec": {**spec, **changes},
    }


def _stand_in_role(told: dict[str, Any] | None) -> dict[str, Any]:
    revision = {"fieldRef": {"fieldPath": "metadata.labels['dcpdisagg.io/revision']"}}
    env: list[dict[str, Any]] = [
        {"name": "STAND_IN_POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "STAND_IN_REVISION", "valueFrom": revision},
    ]
    if told is not None:
        env.append({"name": "STAND_IN", "value": json.dumps(told)})
    main = {
        "name": "main",
        "command": ["python", "-c", STAND_IN],
        "env": env,
        "startupProbe": {"periodSeconds": 1},
        "readinessProbe": {"periodSeconds": 1},
    }
    return {"replicas": 1, "blockSize": 32, "template": {"spec": {"containers": [main]}}}


def conditions(body: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return an object's conditions by type."""
    return {condition["type"]: condition for condition in body.get("status", {}).get("conditions", [])}


def apply_as_user(cluster: Cluster, namespace: str, manifest: dict[str, Any], *options: str) -> str:
    """Apply one object as `kubectl apply` does, and return what it printed."""
    return cluster.kubectl("apply", *options, "-n", namespace, "-f", "-", input=json.dumps(manifest))


def _is_asked(cluster: Cluster, namespace: str) -> bool:
    """Tell whether the API server has the webhook judge an object that only the webhook refuses."""
    manifest = stand_in("probe")
    manifest["spec"]["decode"]["extraArgs"] = ["--port=1"]
    try:
        apply_as_user(cluster, namespace, manifest, "--dry-run=server")
    except AssertionError as refused:
        return "connector-args" in str(refused)
    return False


def _answers(url: str, context: ssl.SSLContext | None = None) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5, context=context) as answer:
            return answer.status == 200
    except OSError:
        return False
