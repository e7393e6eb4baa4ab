"""The webhook as its pod runs it, on this machine's loopback and without a cluster, and callers of it."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
RESOURCE = {"group": "dcpdisagg.io", "version": "v1alpha1", "resource": "dcpdisaggdeployments"}


def review(new: Any, old: Any = None, *, uid: str = "a-uid") -> dict[str, Any]:
    """An AdmissionReview as the API server sends it."""
    request = {
        "uid": uid,
        "kind": {"group": "dcpdisagg.io", "version": "v1alpha1", "kind": "DCPDisaggDeployment"},
        "resource": RESOURCE,
        "name": "chat",
        "namespace": "models",
        "operation": "CREATE" if old is None else "UPDATE",
        "userInfo": {"username": "somebody", "groups": ["system:authenticated"]},
        "object": new,
        "oldObject": old,
        "dryRun": False,
        "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
    }
    return {"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": request}


def make_certificate(folder: Path) -> None:
    """Write tls.crt and tls.key for the loopback address, each replaced at once as a mounted Secret's are."""
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
                "-days",
                "30",
            ),
            *("-subj", f"/CN=webhook-{time.time_ns()}", "-addext", f"subjectAltName=IP:{HOST}"),
            *("-keyout", str(folder / "new.key"), "-out", str(folder / "new.crt")),
        ],
        check=True,
        capture_output=True,
    )
    (folder / "new.key").rename(folder / "tls.key")
    (folder / "new.crt").rename(folder / "tls.crt")


@dataclass
class WebhookProcess:
    """A running webhook."""

    folder: Path
    port: int
    _process: subprocess.Popen[bytes] = field(repr=False)

    @property
    def said(self) -> str:
        return (self.folder / "webhook.log").read_text()

    def connection(self, timeout_s: float = 60.0) -> HTTPSConnection:
        """A connection that trusts the present certificate; it can be used for many requests, by one thread."""
        context = ssl.create_default_context(cafile=str(self.folder / "tls.crt"))
        return HTTPSConnection(HOST, self.port, context=context, timeout=timeout_s)

    def get(self, path: str) -> int:
        with closing(self.connection()) as connection:
            connection.request("GET", path)
            return connection.getresponse().status

    def post(self, body: bytes) -> dict[str, Any]:
        """The response in the answer to a review."""
        with closing(self.connection()) as connection:
            return ask(connection, body)

    def cpu_s(self) -> float:
        """Processor time that the process has used so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def is_running(self) -> bool:
        return self._process.poll() is None

    def order_to_stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = 60.0) -> int:
        return self._process.wait(timeout_s)


def ask(connection: HTTPSConnection, body: bytes) -> dict[str, Any]:
    connection.request("POST", "/validate", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status == 200, content
    return json.loads(content)["response"]


@contextmanager
def webhook_process(folder: Path, *, code: str = "", **environment: str) -> Iterator[WebhookProcess]:
    """The webhook, once it is ready. `code` runs in it before its own."""
    make_certificate(folder)
    with closing(socket.socket()) as listener:
        listener.bind((HOST, 0))
        port = listener.getsockname()[1]
    begin = ["-c", f"{code}\nimport sys\nfrom dcp_operator.webhook import main\nsys.exit(main())"]
    settings = {"DCP_WEBHOOK_CERT_DIR": str(folder), "DCP_WEBHOOK_PORT": str(port), "DCP_WEBHOOK_DRAIN_SECONDS": "0"}
    with (folder / "webhook.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *begin],
            env={**os.environ, **settings, **environment},
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
    webhook = WebhookProcess(folder, port, process)
    try:
        deadline = time.monotonic() + 60
        while not _is_ready(webhook):
            assert process.poll() is None, webhook.said
            assert time.monotonic() < deadline, webhook.said
            time.sleep(0.05)
        yield webhook
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_ready(webhook: WebhookProcess) -> bool:
    try:
        return webhook.get("/readyz") == 200
    except OSError:
        return False
