"""The API server as the operator uses it: plain objects in and out, one exception, every call with a deadline.

The official client supplies configuration, credentials and connections; its generated models are left aside, because
server-side apply wants exactly the fields that a manifest states.
"""

import json
from typing import Any, Final, cast
from urllib.parse import quote

import urllib3
from kubernetes import client as _untyped_client
from kubernetes import config as _untyped_config

from dcp_operator import names
from dcp_operator.kinds import EVENT, Kind

_client: Any = _untyped_client
_config: Any = _untyped_config

Body = dict[str, Any]

#: Seconds to connect, seconds without an answer.
_TIMEOUT_S: Final = (5, 30)
_APPLY: Final = "application/apply-patch+yaml"
_JSON: Final = "application/json"
_PAGE: Final = 500


class ApiError(Exception):
    """An answer of the API server that is not a success, or no answer at all (status 0)."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message


class Api:
    """A pool of connections to the API server. Calls block; they are safe from several threads."""

    def __init__(self, connections: int = 8) -> None:
        configuration: Any = _client.Configuration()
        load_credentials(configuration)
        configuration.connection_pool_maxsize = connections
        self._client: Any = _client.ApiClient(configuration)
        self._client.user_agent = names.OPERATOR

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
                items.append({"apiVersion": kind.api_version, "kind": kind.kind, **item})
            token = page["metadata"].get("continue")
            if not token:
                return items, page["metadata"].get("resourceVersion", "")
            query["continue"] = token

    def apply(self, kind: Kind, namespace: str, manifest: Body, subresource: str | None = None) -> Body:
        """Apply a manifest server-side: what it states becomes so, and other owners' fields are left alone."""
        path = kind.path(namespace, manifest["metadata"]["name"], subresource)
        query = {"fieldManager": names.FIELD_MANAGER, "force": "true"}
        return self._call("PATCH", path, query, manifest, _APPLY)

    def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Delete the object with this uid; nothing happens if it is gone or another has its name."""
        options = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            self._call("DELETE", kind.path(namespace, name), None, options)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    def create_event(self, namespace: str, event: Body) -> None:
        """Record an event."""
        self._call("POST", EVENT.path(namespace), None, event)

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
        headers = {"Accept": _JSON, "Content-Type": content_type}
        # The client encodes JSON itself and wants other types as text.
        payload = json.dumps(body) if content_type == _APPLY else body
        params = [(key, value) for key, value in (query or {}).items() if value]
        try:
            request = self._client.param_serialize(
                method, quote(path), None, params, headers, payload, auth_settings=["BearerToken"]
            )
            response = self._client.call_api(*request, _request_timeout=_TIMEOUT_S)
            data = response.read()
        except urllib3.exceptions.HTTPError as error:
            raise ApiError(0, "Unreachable", f"the API server does not answer: {error}") from error
        answer = _decode(data)
        if 200 <= response.status < 300:
            return answer
        raise ApiError(
            response.status,
            str(answer.get("reason") or response.reason or "Unknown"),
            str(answer.get("message") or f"HTTP status {response.status}"),
        )


def load_credentials(configuration: Any) -> None:
    """Fill in address and credentials: of the pod's ServiceAccount, else of the kubeconfig that kubectl would use.

    Raises ApiError where there is neither.
    """
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
