"""The custom metrics API with one metric of pods, answered by a test, so that a real autoscaler has what to compute by.

Adapters serve this API as an extension of the API server: an APIService names a Service, and the API server hands on
what comes for the group. Here the Service leads to a server of the test on the node's bridge.
"""

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from devcluster.paths import this_cache
from devcluster.settings import GATEWAY
from tests.support.cluster import Cluster
from tests.support.cluster_watch import ApiServer
from tests.support.operator_process import conditions, make_certificate, wait_for

GROUP, VERSION = "custom.metrics.k8s.io", "v1beta2"
_ROOT = f"/apis/{GROUP}/{VERSION}"
_SERVICE = "pod-metrics"


@dataclass
class PodMetric:
    """A metric of pods. Those of whom somebody asks share `total` evenly; pods that go have no part in it."""

    name: str
    total: int = 0
    #: Label selectors of the questions.
    asked: list[str] = field(default_factory=list)


@contextmanager
def pod_metric(cluster: Cluster, namespace: str, folder: Path, name: str) -> Iterator[PodMetric]:
    """Serve a metric of the pods of the cluster until the block ends. `folder` receives the certificate."""
    metric = PodMetric(name)
    make_certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    server = ThreadingHTTPServer((GATEWAY, 0), _handler(metric, ApiServer(this_cache().cluster)))
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    registration = f"{VERSION}.{GROUP}"
    try:
        cluster.apply(*_way_to(server.server_address[1]), namespace=namespace)
        cluster.apply(_registration(namespace))
        wait_for("the metrics API is served", lambda: _is_available(cluster, registration))
        yield metric
    finally:
        # First of all: no namespace can be deleted while a registered API doesn't answer.
        cluster.kubectl("delete", "apiservice", registration, "--ignore-not-found")
        server.shutdown()
        server.server_close()


def _handler(metric: PodMetric, api: ApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            found = _answer(metric, api, self.path)
            body = json.dumps(found or {"kind": "Status", "apiVersion": "v1", "code": 404}).encode()
            self.send_response(200 if found else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def _answer(metric: PodMetric, api: ApiServer, target: str) -> dict[str, Any] | None:
    """Return what is at a path of the API; None where there is nothing."""
    url = urlsplit(target)
    path = unquote(url.path)
    if path == _ROOT:
        entry = {"name": f"pods/{metric.name}", "singularName": "", "namespaced": True, "kind": "MetricValueList"}
        resources = [{**entry, "verbs": ["get"]}]
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": f"{GROUP}/{VERSION}",
            "resources": resources,
        }
    head, _, rest = path.removeprefix(f"{_ROOT}/namespaces/").partition("/")
    if not path.startswith(f"{_ROOT}/namespaces/") or rest != f"pods/*/{metric.name}":
        return None
    selector = parse_qs(url.query).get("labelSelector", [""])[0]
    metric.asked.append(selector)
    query = urlencode({"labelSelector": selector})
    pods = [pod["metadata"] for pod in api.items(f"/api/v1/namespaces/{head}/pods?{query}")]
    staying = [pod for pod in pods if "deletionTimestamp" not in pod]
    return {
        "kind": "MetricValueList",
        "apiVersion": f"{GROUP}/{VERSION}",
        "metadata": {},
        "items": [
            {
                "describedObject": {"kind": "Pod", "apiVersion": "v1", "namespace": head, "name": pod["name"]},
                "metric": {"name": metric.name},
                "timestamp": "2026-01-01T00:00:00Z",
                "value": f"{metric.total * 1000 // len(staying)}m",
            }
            for pod in staying
        ],
    }


def _way_to(port: int) -> list[dict[str, Any]]:
    """Return a Service that leads to a port of the node's bridge."""
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": _SERVICE},
        "spec": {"ports": [{"name": "https", "port": 443, "targetPort": port}]},
    }
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": _SERVICE, "labels": {"kubernetes.io/service-name": _SERVICE}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [GATEWAY], "conditions": {"ready": True}}],
        "ports": [{"name": "https", "port": port, "protocol": "TCP"}],
    }
    return [service, endpoints]


def _registration(namespace: str) -> dict[str, Any]:
    return {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": f"{VERSION}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "version": VERSION,
            "service": {"name": _SERVICE, "namespace": namespace, "port": 443},
            "insecureSkipTLSVerify": True,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
        },
    }


def _is_available(cluster: Cluster, registration: str) -> bool:
    said = conditions(cluster.get("apiservice", registration)).get("Available", {})
    return said.get("status") == "True"
