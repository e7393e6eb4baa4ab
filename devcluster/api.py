"""The few requests that the tool itself makes to the API server and to the components' health ports."""

import http.client
import json
import socket
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from devcluster.paths import ClusterPaths
from devcluster.settings import APISERVER, NODE_NAME


def _context(paths: ClusterPaths) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(paths.pki / "ca.crt"))
    context.load_cert_chain(paths.pki / "admin.crt", paths.pki / "admin.key")
    return context


def _loopback_context() -> ssl.SSLContext:
    # Health ports on loopback sign their own certificates, and only the status code is read from them.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def get(paths: ClusterPaths, path: str, timeout_s: float = 5) -> Any:
    """The JSON answer of the API server to a GET; None when it does not answer with 200."""
    status, body = _request(f"https://{APISERVER.address}:{APISERVER.number}{path}", _context(paths), timeout_s)
    if status != 200:
        return None
    try:
        return json.loads(body)
    except ValueError:
        return None


def answers(paths: ClusterPaths, health: str, timeout_s: float = 2) -> bool:
    """Whether a component's health URL says 200, or its socket takes connections."""
    if health.startswith("/"):
        return _accepts(Path(health), timeout_s)
    if not health.startswith("https://"):
        return _request(health, None, timeout_s)[0] == 200
    is_apiserver = f"{APISERVER.address}:{APISERVER.number}" in health
    try:
        context = _context(paths) if is_apiserver else _loopback_context()
    except OSError:
        return False
    return _request(health, context, timeout_s)[0] == 200


def _accepts(path: Path, timeout_s: float) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(timeout_s)
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


def _request(url: str, context: ssl.SSLContext | None, timeout_s: float) -> tuple[int, bytes]:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 0
    if context:
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, port, timeout=timeout_s, context=context
        )
    else:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", f"{parts.path}?{parts.query}" if parts.query else parts.path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def node_problem(paths: ClusterPaths) -> str:
    """Why pods can't run yet, in words; "" when the node is Ready and the default service account is there."""
    node = get(paths, f"/api/v1/nodes/{NODE_NAME}")
    if node is None:
        return "the kubelet has not registered the node"
    problem = unready_reason(node)
    if not problem and get(paths, "/api/v1/namespaces/default/serviceaccounts/default") is None:
        return "the default service account is not there"
    return problem


def unready_reason(node: dict[str, Any]) -> str:
    """The message of a Node's Ready condition unless that is True, or the taint that keeps pods away; "" when fine."""
    ready = [item for item in node.get("status", {}).get("conditions", []) if item["type"] == "Ready"]
    if not ready or ready[0]["status"] != "True":
        return str(ready[0].get("message", "")) if ready else "the node has no Ready condition"
    taints = [taint["key"] for taint in node.get("spec", {}).get("taints", [])]
    return f"the node is tainted with {', '.join(taints)}" if taints else ""
