"""The API server as the operator uses it: plain objects in and out, one exception, every call with a deadline.

The official client supplies configuration, credentials and connections; its generated models are left aside, because
server-side apply wants exactly the fields that a manifest states.
"""

import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, cast
from urllib.parse import quote, urlencode

import urllib3
from kubernetes import client as _untyped_client
from kubernetes import config as _untyped_config

from dcp_operator import names
from dcp_operator.kinds import CONTROLLER_REVISION, EVENT, POD, Kind
from dcp_operator.metrics import request_made
from dcp_operator.server_clock import ServerClock

_client: Any = _untyped_client
_config: Any = _untyped_config

Body = dict[str, Any]

#: Seconds to connect, seconds without an answer.
_TIMEOUT_S: Final = (5, 30)
_APPLY: Final = "application/apply-patch+yaml"
_JSON: Final = "application/json"
_MERGE: Final = "application/merge-patch+json"
_PAGE: Final = 500
#: The version of no object: etcd counts from 1, and its first write is number 2. Applying a manifest that states it is
#: refused with 409 by whatever has the name, and makes the object where nothing has it.
_NO_VERSION: Final = "1"
#: An API server that has too much to do says when to come again. So often that is done within one call, and so long a
#: pause at most, in seconds; after that the call has failed, and whoever made it tries again in its own time.
_COME_AGAIN: Final = 5
_MAX_PAUSE_S: Final = 5.0
#: A connection that was never made is tried again; what may have reached the API server is not sent twice.
_RETRIES: Final = urllib3.Retry(total=None, connect=2, read=0, redirect=0, status=0, other=0)
#: How long one watch lasts, in seconds, and how much of it is read at once.
_WATCH_S: Final = 270
_CHUNK_BYTES: Final = 65536

#: What a watch says of no object: its version is that up to which everything has been told.
BOOKMARK: Final = "BOOKMARK"


class ApiError(Exception):
    """An answer of the API server that is not a success, or no answer at all (status 0)."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message


class Api:
    """A pool of connections to the API server. Calls block; they are safe from several threads.

    `keep` returns what is wanted of an object in a list or a watch: of thousands of objects all of it is held for no
    longer than a page. It is called in the thread of the call.
    """

    def __init__(
        self,
        connections: int = 8,
        context: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
        keep: Callable[[Body], Body] = lambda body: body,
    ) -> None:
        configuration: Any = _client.Configuration()
        load_credentials(configuration, context)
        configuration.connection_pool_maxsize = connections
        self._configuration = configuration
        self._client: Any = _client.ApiClient(configuration)
        # Requests go to the connections themselves: what is sent a second time, and when, is decided here.
        self._pool: urllib3.PoolManager = self._client.rest_client.pool_manager
        self._host = str(configuration.host).rstrip("/")
        self._sleep = sleep
        self._keep = keep
        #: The API server's time, as its answers tell it.
        self.clock = ServerClock()

    def get(self, kind: Kind, namespace: str, name: str) -> Body | None:
        """Return one object, None if there is none."""
        try:
            return self._call("GET", kind.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def list(self, kind: Kind, namespace: str | None, label_selector: str = "") -> tuple[list[Body], str]:
        """Return all objects of a kind in a namespace (None: in all), and the resource version of the list."""
        items: list[Body] = []
        query = {"limit": str(_PAGE), "labelSelector": label_selector}
        while True:
            page = self._call("GET", kind.path(namespace), query)
            for item in cast("list[Body]", page.get("items") or []):
                # Items of a list come without what the list says for all of them.
                items.append(self._keep({"apiVersion": kind.api_version, "kind": kind.kind, **item}))
            token = page["metadata"].get("continue")
            if not token:
                return items, page["metadata"].get("resourceVersion", "")
            query["continue"] = token

    def apply(self, kind: Kind, namespace: str, manifest: Body, subresource: str | None = None) -> Body:
        """Apply a manifest server-side: what it states becomes so, and other owners' fields are left alone."""
        path = kind.path(namespace, manifest["metadata"]["name"], subresource)
        query = {"fieldManager": names.FIELD_MANAGER, "force": "true"}
        return self._call("PATCH", path, query, manifest, _APPLY)

    def make(self, kind: Kind, namespace: str, manifest: Body) -> Body:
        """Apply a manifest of an object that does not exist. Raises ApiError 409 where the name is taken."""
        return self._make(kind, namespace, manifest, names.FIELD_MANAGER)

    def create(self, kind: Kind, namespace: str, manifest: Body) -> Body:
        """Make an object. What it states is not what `apply` owns. Raises ApiError 409 where the name is taken.

        A ControllerRevision is applied too, by another manager: the API server lets nobody change a byte of its data,
        and writes them in its own way (order, spaces, numbers) as soon as anything of the object is applied.
        """
        if kind is CONTROLLER_REVISION:
            return self._make(kind, namespace, manifest, names.FIELD_MANAGER_ONCE)
        return self._call("POST", kind.path(namespace), {"fieldManager": names.FIELD_MANAGER_ONCE}, manifest)

    def _make(self, kind: Kind, namespace: str, manifest: Body, manager: str) -> Body:
        metadata = {**manifest["metadata"], "resourceVersion": _NO_VERSION}
        path = kind.path(namespace, metadata["name"])
        return self._call("PATCH", path, {"fieldManager": manager}, {**manifest, "metadata": metadata}, _APPLY)

    def merge(self, kind: Kind, namespace: str, name: str, patch: Body, manager: str) -> Body:
        """Merge a patch (RFC 7386) into an object, in the name of a field manager; return the object as it is then."""
        return self._call("PATCH", kind.path(namespace, name), {"fieldManager": manager}, patch, _MERGE)

    def scale(self, kind: Kind, namespace: str, name: str, uid: str, replicas: int) -> str | None:
        """Have the workload with this uid ask for so many pods; return its version then.

        Nothing happens if it is gone or another has its name: None.
        """
        patch = {"metadata": {"uid": uid}, "spec": {"replicas": replicas}}
        query = {"fieldManager": names.FIELD_MANAGER}
        try:
            answer = self._call("PATCH", kind.path(namespace, name, "scale"), query, patch, _MERGE)
        except ApiError as error:
            if error.status in (404, 409):
                return None
            raise
        return answer["metadata"]["resourceVersion"]

    def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Delete the object with this uid; nothing happens if it is gone or another has its name."""
        options = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        self._delete(kind.path(namespace, name), options)

    def delete_with_dependents(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Delete the object with this uid once what it owns is gone; nothing happens if it is gone itself."""
        options = {"preconditions": {"uid": uid}, "propagationPolicy": "Foreground"}
        self._delete(kind.path(namespace, name), options)

    def _delete(self, path: str, options: Body) -> None:
        try:
            self._call("DELETE", path, None, options)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    def annotate(self, kind: Kind, namespace: str, name: str, uid: str, annotations: dict[str, str]) -> Body:
        """Set annotations of the object with this uid beside those that are applied; return it."""
        body = {"metadata": {"uid": uid, "annotations": annotations}}
        query = {"fieldManager": names.FIELD_MANAGER_ONCE}
        return self._call("PATCH", kind.path(namespace, name), query, body, _MERGE)

    def watch(self, kind: Kind, namespace: str | None, label_selector: str, version: str) -> Iterator[tuple[str, Body]]:
        """Yield what changes after a resource version, and how: ADDED, MODIFIED or DELETED.

        Now and then a BOOKMARK comes, with no more than a version, so that a watch where nothing happens can go on from
        a young one. Ends when the API server ends it, after some minutes. Raises ApiError, with status 410 for a
        version that is too old to go on from.
        """
        query = {"watch": "true", "labelSelector": label_selector, "resourceVersion": version}
        query |= {"timeoutSeconds": str(_WATCH_S), "allowWatchBookmarks": "true"}
        response = self._open("GET", kind.path(namespace), query, timeout_s=(_TIMEOUT_S[0], _WATCH_S + 30))
        try:
            for line in _lines(response):
                event = _decode(line)
                body = cast("Body", event.get("object") or {})
                if event.get("type") == "ERROR":
                    raise _error_of(int(body.get("code") or 0), "", body)
                yield str(event.get("type")), self._keep(body)
        except urllib3.exceptions.HTTPError as error:
            raise ApiError(0, "Unreachable", f"the watch of {kind.plural} was cut: {error}") from error
        finally:
            response.close()

    def drop_from_status(self, kind: Kind, namespace: str, name: str, uid: str, fields: Body) -> Body:
        """Take fields out of a status, whoever put them there: those that are None in `fields`. Return the object."""
        patch = {"metadata": {"uid": uid}, "status": fields}
        query = {"fieldManager": names.FIELD_MANAGER}
        return self._call("PATCH", kind.path(namespace, name, "status"), query, patch, _MERGE)

    def create_event(self, namespace: str, event: Body) -> Body:
        """Record an event; return it as it is stored."""
        return self._call("POST", EVENT.path(namespace), None, event)

    def repeat_event(self, namespace: str, name: str, count: int, now: str) -> None:
        """Say that a stored event happened again, so many times in all and last at `now` (RFC 3339)."""
        again = {"count": count, "lastTimestamp": now}
        self._call("PATCH", EVENT.path(namespace, name), None, again, _MERGE)

    def read_log(self, namespace: str, pod: str, container: str, *, previous: bool, num_lines: int) -> str:
        """Return the last lines that a container wrote; with `previous` those from before its last restart."""
        query = {"container": container, "previous": str(previous).lower(), "tailLines": str(num_lines)}
        data = self._send("GET", POD.path(namespace, pod, "log"), query, None, _JSON, accept="*/*")
        return data.decode("utf-8", "replace")

    def serves(self, kind: Kind) -> bool:
        """Whether the API server knows a kind."""
        try:
            answer = self._call("GET", f"/apis/{kind.group}/{kind.version}")
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        resources = cast("list[Body]", answer.get("resources") or [])
        return any(resource.get("name") == kind.plural for resource in resources)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _call(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: Body | None = None,
        content_type: str = _JSON,
    ) -> Body:
        return _decode(self._send(method, path, query, body, content_type))

    def _send(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None,
        body: Body | None,
        content_type: str,
        accept: str = _JSON,
    ) -> bytes:
        """Return the body of an answer that is a success. Raises ApiError."""
        response = self._open(method, path, query, body, content_type, accept)
        try:
            return response.data
        except urllib3.exceptions.HTTPError as error:
            raise _unreachable(error) from error

    def _open(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None,
        body: Body | None = None,
        content_type: str = _JSON,
        accept: str = _JSON,
        timeout_s: tuple[float, float] = _TIMEOUT_S,
    ) -> urllib3.BaseHTTPResponse:
        """Return an answer that is a success, its body not read yet. Raises ApiError."""
        url = self._url(path, query)
        payload = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        for _ in range(_COME_AGAIN):
            response = self._request(method, url, self._headers(accept, content_type), payload, timeout_s)
            pause_s = _pause_s(response)
            if pause_s is None:
                break
            response.drain_conn()
            self._sleep(pause_s * random.uniform(1.0, 1.2))  # noqa: S311 - those who were told the same spread out
        else:
            response = self._request(method, url, self._headers(accept, content_type), payload, timeout_s)
        request_made(method, path, response.status)
        if 200 <= response.status < 300:
            return response
        try:
            refusal = _decode(response.data)
        except urllib3.exceptions.HTTPError as error:
            raise _unreachable(error) from error
        raise _error_of(response.status, response.reason, refusal)

    def _request(
        self, method: str, url: str, headers: dict[str, str], payload: bytes | None, timeout_s: tuple[float, float]
    ) -> urllib3.BaseHTTPResponse:
        try:
            response = self._pool.request(
                method,
                url,
                body=payload,
                headers=headers,
                timeout=urllib3.Timeout(connect=timeout_s[0], read=timeout_s[1]),
                retries=_RETRIES,
                preload_content=False,
            )
        except urllib3.exceptions.HTTPError as error:
            request_made(method, url.partition("?")[0].removeprefix(self._host), 0)
            raise _unreachable(error) from error
        self.clock.hear(response.headers.get("Date"))
        return response

    def _url(self, path: str, query: dict[str, str] | None) -> str:
        given = urlencode({key: value for key, value in (query or {}).items() if value})
        return f"{self._host}{quote(path)}{'?' if given else ''}{given}"

    def _headers(self, accept: str, content_type: str) -> dict[str, str]:
        # Asked each time: a ServiceAccount's token is renewed while the process runs.
        token = self._configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        headers = {"Accept": accept, "Content-Type": content_type, "User-Agent": names.OPERATOR}
        return {**headers, "Authorization": token} if token else headers


def _pause_s(response: urllib3.BaseHTTPResponse) -> float | None:
    """Return when an API server that has too much to do wants to be asked again, in seconds; None for an answer."""
    said = response.headers.get("Retry-After", "") if response.status == 429 else ""
    return min(float(said), _MAX_PAUSE_S) if said.isdecimal() else None


def _unreachable(error: Exception) -> ApiError:
    return ApiError(0, "Unreachable", f"the API server does not answer: {error}")


def _error_of(status: int, reason: str | None, answer: Body) -> ApiError:
    """Return the error for an answer that is no success; `answer` is its body, a Status as a rule."""
    return ApiError(
        status,
        str(answer.get("reason") or reason or "Unknown"),
        str(answer.get("message") or f"HTTP status {status}"),
    )


def _lines(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """Yield the lines of an answer as they come in; a last one that was cut short is left out."""
    rest = b""
    for chunk in response.stream(_CHUNK_BYTES):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole


def context_namespace(context: str | None) -> str:
    """Return the namespace of a kubeconfig context (None: of the current one) as kubectl would take it."""
    try:
        contexts, current = _config.list_kube_config_contexts()
    except _config.ConfigException:
        return "default"
    named: list[Body] = [each for each in contexts if each["name"] == (context or current["name"])]
    return str(named[0]["context"].get("namespace") or "default") if named else "default"


def load_credentials(configuration: Any, context: str | None = None) -> None:
    """Fill in address and credentials: of the pod's ServiceAccount, else of the kubeconfig that kubectl would use.

    A kubeconfig context that is named is taken in any case. Raises ApiError where there is none of them.
    """
    if context is not None:
        try:
            return _config.load_kube_config(context=context, client_configuration=configuration)
        except _config.ConfigException as error:
            raise ApiError(0, "NoCredentials", f"the kubeconfig has no usable context {context}: {error}") from error
    try:
        _config.load_incluster_config(configuration)
    except _config.ConfigException:
        try:
            _config.load_kube_config(client_configuration=configuration)
        except _config.ConfigException as error:
            raise ApiError(
                0,
                "NoCredentials",
                "found neither a ServiceAccount's token (not in a pod?) nor a kubeconfig; set KUBECONFIG",
            ) from error


def _decode(data: bytes) -> Body:
    try:
        value = json.loads(data)
    except ValueError:
        return {"message": data.decode("utf-8", "replace").strip()[:500]}
    return cast("Body", value) if isinstance(value, dict) else {}
