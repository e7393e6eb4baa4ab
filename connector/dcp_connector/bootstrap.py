"""The small HTTP server in the engine's scheduler process, and the client that reads another engine's.

    GET /query         what Mooncake routers expect: {"0": {"engine_id", "worker_addr": {tp: {pp: "tcp://host:port"}}}}
    GET /v1/topology   this engine's handshake (`handshake.Topology`), signed
    GET /readyz        200 when every rank is up, the engine's own /health answers 200 and it doesn't hang: the pod's
                       readiness probe
    GET /healthz       200 while every rank lives, else 503 and which doesn't, see `health`
    GET /v1/failures   why transfers failed here, the last of each kind, see `failures`

It runs in threads of its own, so that it answers while the engine computes.
"""

import http.client
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from dcp_connector.errors import PeerError, Reason, StartupError
from dcp_connector.failures import Entry
from dcp_connector.handshake import (
    MAX_TOPOLOGY_BYTES,
    SIGNATURE_HEADER,
    Topology,
    decode_topology,
    encode_topology,
    query_answer,
)
from dcp_connector.httpd import Answer, HttpServer, get, json_text, text
from dcp_connector.siblings import MAX_SIBLINGS, are_siblings, data_parallel_rank
from dcp_connector.wire import Secret, is_signed, sign

#: Time for one request of a decode engine, from the connection to the last byte.
FETCH_TIMEOUT_S = 5.0
#: vLLM's /health says nothing of an engine that hangs in a step. The longest honest step is a small part of this.
STALLED_S = 60.0
_HEALTH_TIMEOUT_S = 2.0
_SIBLING_TIMEOUT_S = 1.0
_STARTING = "the workers have not reported their KV pages yet"


class BootstrapServer:
    """Serves one engine's handshake on `port` of all interfaces until `close`.

    `api_port` is the engine's own HTTP port, asked for /health by /readyz. `stalled_s` tells how long the engine's
    present step takes already. Raises StartupError when the port is taken.
    """

    def __init__(
        self,
        port: int,
        api_port: int,
        secret: Secret,
        *,
        serves_query: bool,
        stalled_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._stalled_s = stalled_s
        self._secret = secret
        self._api_port = api_port
        self._serves_query = serves_query
        self._topology: Topology | None = None
        self._body = b""
        self._siblings: dict[int, dict[str, object]] = {}
        self._find_problems: Callable[[], Sequence[str]] = tuple
        self._find_failures: Callable[[], list[Entry]] = list
        try:
            self._server = HttpServer("", port, self._respond, "dcp-bootstrap")
        except OSError as error:
            raise StartupError(
                f"the connector's bootstrap server can't listen on port {port}: {error}; "
                "set kv_connector_extra_config.bootstrap_port to a free one"
            ) from error

    @property
    def port(self) -> int:
        """The port that is listened on (useful when 0 was asked for)."""
        return self._server.port

    def publish(
        self,
        topology: Topology,
        find_problems: Callable[[], Sequence[str]] = tuple,
        find_failures: Callable[[], list[Entry]] = list,
    ) -> None:
        """Serve this topology from now on.

        `find_problems` says what is wrong with its ranks when /healthz is asked, `find_failures` answers /v1/failures.
        """
        self._find_problems = find_problems
        self._find_failures = find_failures
        self._body = encode_topology(topology)
        self._topology = topology

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    def _respond(self, path: str) -> Answer:
        """Return status, headers and body for one path."""
        topology = self._topology
        if path == "/healthz":
            return self._health(topology)
        if path == "/readyz":
            return self._readiness(topology)
        if path == "/v1/failures":
            return json_text(200, {"failures": self._find_failures()})
        if path == "/query" and self._serves_query:
            return json_text(503, {}) if topology is None else json_text(200, self._query(topology))
        if path == "/v1/topology":
            if topology is None:
                return text(503, _STARTING)
            signed = {SIGNATURE_HEADER: sign(self._secret, self._body)}
            return 200, {"Content-Type": "application/json", **signed}, self._body
        return text(
            404,
            "no such path; there are /query (on prefill), /v1/topology, /v1/failures, /readyz and /healthz",
        )

    def _query(self, topology: Topology) -> dict[str, object]:
        """Return all data-parallel ranks of this pod: this one, and those that listen on the ports behind it."""
        engine_id, answer = topology.side.engine_id, query_answer(topology)
        if data_parallel_rank(engine_id) is None:
            return answer
        for port in range(self.port + 1, min(self.port + MAX_SIBLINGS, 65536)):
            known = self._siblings.get(port)
            if known is None:
                try:
                    found = fetch_topology(f"http://127.0.0.1:{port}", self._secret, _SIBLING_TIMEOUT_S)
                except PeerError:
                    break  # the last one, or one that still starts
                if not are_siblings(engine_id, found.side.engine_id):
                    break
                known = self._siblings[port] = query_answer(found)
            answer |= known
        return answer

    def _health(self, topology: Topology | None) -> Answer:
        if topology is None:
            return text(503, _STARTING)
        problems = self._find_problems()
        return text(503, "\n".join(problems)) if problems else text(200, "ok")

    def _readiness(self, topology: Topology | None) -> Answer:
        if topology is None:
            return text(503, _STARTING)
        try:
            status, _, _ = get("127.0.0.1", self._api_port, "/health", _HEALTH_TIMEOUT_S, 4096)
        except (OSError, http.client.HTTPException) as error:
            return text(503, f"the engine's /health on port {self._api_port} doesn't answer: {error}")
        if status != 200:
            return text(503, f"the engine's /health on port {self._api_port} answers {status}")
        stalled_s = self._stalled_s()
        if stalled_s > STALLED_S:
            return text(503, f"the engine hangs: it has been computing one step for {stalled_s:.0f} s")
        return text(200, "ready")


def fetch_topology(origin: str, secret: Secret, timeout_s: float = FETCH_TIMEOUT_S) -> Topology:
    """Return the topology behind "http://HOST:PORT".

    Raises PeerError: BOOTSTRAP_UNREACHABLE, BOOTSTRAP_GARBAGE (also for a wrong signature), INCOMPATIBLE (version).
    """
    parts = urlsplit(origin)
    try:
        status, headers, body = get(
            parts.hostname or "", parts.port or 80, "/v1/topology", timeout_s, MAX_TOPOLOGY_BYTES
        )
    except OSError as error:
        raise PeerError(Reason.BOOTSTRAP_UNREACHABLE, f"{origin} doesn't answer: {error}") from error
    except (http.client.HTTPException, ValueError) as error:
        raise PeerError(Reason.BOOTSTRAP_GARBAGE, f"{origin} doesn't speak HTTP: {error!r}") from error
    if status == 503:
        raise PeerError(Reason.BOOTSTRAP_UNREACHABLE, f"{origin} is not ready: {_excerpt(body)}")
    if status != 200:
        raise PeerError(Reason.BOOTSTRAP_GARBAGE, f"{origin}/v1/topology answers {status}: {_excerpt(body)}")
    if len(body) > MAX_TOPOLOGY_BYTES:
        raise PeerError(Reason.BOOTSTRAP_GARBAGE, f"{origin}/v1/topology is longer than {MAX_TOPOLOGY_BYTES} bytes")
    if not is_signed(secret, body, headers.get(SIGNATURE_HEADER.lower(), "")):
        raise PeerError(
            Reason.BOOTSTRAP_GARBAGE,
            f"{origin}/v1/topology is not signed with this engine's control secret: it is no prefill engine of this "
            "deployment, or the two roles hold different secrets",
        )
    return decode_topology(body)


def _excerpt(body: bytes) -> str:
    return ascii(body[:120].decode("utf-8", "replace"))
