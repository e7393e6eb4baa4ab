"""Talking to stand-in engines in pods: what they are told to do, what they say, and through whom a request went."""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from dcp_operator.names import PORT_NAME_BOOTSTRAP, PORT_NAME_HTTP
from devcluster.settings import GATEWAY
from tests.support.cluster import Cluster
from tests.support.operator_process import wait_for


@dataclass(frozen=True, slots=True)
class Served:
    """Through which pods and revisions a request went. `prefill` is None where decode computed the prompt unasked."""

    prefill: dict[str, str] | None
    decode: dict[str, str]
    recomputed: str | None

    @property
    def revisions(self) -> tuple[str | None, str]:
        """The pair of revisions."""
        return (self.prefill or {}).get("revision"), self.decode["revision"]


def tell(real: Cluster, namespace: str, pod: str, **settings: Any) -> None:
    """Change settings of the stand-in in a pod; `stand_in_engine` lists them."""
    call(f"http://{_address(real, namespace, pod)}/control", settings)


def told(real: Cluster, namespace: str, pod: str) -> dict[str, Any]:
    """Return the settings of the stand-in in a pod, with its pod, revision, engine_id and number of pinned prompts."""
    return call(f"http://{_address(real, namespace, pod)}/control")


def metrics(real: Cluster, namespace: str, pod: str) -> dict[str, float]:
    """Return the engine's numbers by name, summed over labels."""
    with urllib.request.urlopen(
        f"http://{_address(real, namespace, pod, PORT_NAME_HTTP)}/metrics", timeout=10
    ) as answer:
        return numbers_of(answer.read().decode())


def numbers_of(text: str) -> dict[str, float]:
    """Return the numbers in the text of /metrics by name, summed over labels."""
    numbers: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name = line.partition("{")[0]
            numbers[name] = numbers.get(name, 0.0) + float(line.rpartition(" ")[2])
    return numbers


def complete(address: str, prompt: str = "hello", *, model: str = "chat", timeout_s: float = 15.0) -> Served:
    """Send a prompt to "host:port" of a Service or a router. Raises OSError, HTTPError included, for a failed one."""
    asked = {"model": model, "prompt": prompt, "max_tokens": 4}
    return served(call(f"http://{address}/v1/completions", asked, timeout_s))


def first_answer(address: str, *, model: str = "chat") -> Served:
    """Send a prompt to "host:port" of a Service until it takes connections; return what answered.

    Ready comes before the node's rules for the Service know the router. An answer that is an error is raised.
    """

    def answer() -> Served | None:
        try:
            return complete(address, model=model)
        except urllib.error.HTTPError:
            raise
        except OSError:
            return None

    return wait_for(f"{address} takes connections", answer, 20)


def served(answer: dict[str, Any]) -> Served:
    """Return what decode's answer says of the pair."""
    return Served(**json.loads(answer["choices"][0]["text"]))


def call(url: str, body: dict[str, Any] | None = None, timeout_s: float = 10.0) -> dict[str, Any]:
    """GET, or POST a body; return the JSON of the answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return json.loads(answer.read())


def _address(real: Cluster, namespace: str, pod: str, port_name: str = PORT_NAME_BOOTSTRAP) -> str:
    """Return host and port: pods have addresses on the node's bridge, where tests run too.

    The connector's port answers while the engine's own is still closed.
    """
    body = real.get("pod", pod, "-n", namespace)
    address = body["status"]["podIP"]
    assert address.startswith(GATEWAY.rpartition(".")[0]), f"pod {pod} has no address on the node's bridge"
    ports = {port["name"]: port["containerPort"] for port in body["spec"]["containers"][0]["ports"]}
    return f"{address}:{ports[port_name]}"
