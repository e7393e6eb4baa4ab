"""The policies with somebody who enforces them: pods as the operator labels them connect to each other, or don't.

What gets through is compared with `tests.support.network_policies`, by which the other tests judge policies.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcp_operator import names
from dcp_operator.api.spec import Spec
from dcp_operator.build import Context
from dcp_operator.build.network_policy import build_engine_policy, build_router_policy
from dcp_operator.settings import Role
from devcluster.paths import this_cache
from devcluster.policies import enforced
from tests.support.cluster import Cluster
from tests.support.network_policies import End, allows
from tests.support.objects import spec
from tests.support.operator_process import IMAGE, wait_for

PORTS = {"http": 8000, "kv-bootstrap": 8998, "metrics": 29000, "random": 15123}
#: Listens on all ports that are given, and takes every connection.
SERVER = """
import socket, sys, threading
def serve(port):
    with socket.create_server(("0.0.0.0", port)) as listener:
        while True:
            listener.accept()[0].close()
threads = [threading.Thread(target=serve, args=(int(port),)) for port in sys.argv[1:]]
[thread.start() for thread in threads]
"""
#: Tries all "host:port" that are given, together, and prints those that take a connection. What is dropped takes the
#: whole timeout, and what is let through less than a thousandth of it.
CLIENT = """
import socket, sys, concurrent.futures
def takes(where):
    host, port = where.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
    except OSError:
        return False
    return True
with concurrent.futures.ThreadPoolExecutor(64) as pool:
    print(*[where for where, taken in zip(sys.argv[1:], pool.map(takes, sys.argv[1:])) if taken])
"""


@pytest.fixture(scope="module")
def ends(real: Cluster) -> Iterator[dict[str, End]]:
    """Pods in four namespaces by name, each of which listens on all ports."""
    with (
        real.namespace("np-models") as models,
        real.namespace("np-other") as other,
        real.namespace("np-monitoring") as monitoring,
        real.namespace("np-system") as system,
    ):
        found = {
            **{role.value: End(models, names.labels("chat", role, "0a1b2c3d"), PORTS) for role in Role},
            "router": End(models, names.labels("chat", names.ROUTER, "0a1b2c3d"), PORTS),
            "other-prefill": End(models, names.labels("other", Role.PREFILL, "0a1b2c3d"), PORTS),
            "neighbour": End(models, {"app": "web"}, PORTS),
            "stranger": End(other, names.labels("chat", Role.PREFILL, "0a1b2c3d"), PORTS),
            "prometheus": End(monitoring, {"app": "prometheus"}, PORTS),
            "operator": End(system, {"app.kubernetes.io/component": "controller"}, PORTS),
        }
        real.apply(*(_pod(name, end) for name, end in found.items()))
        for namespace in {end.namespace for end in found.values()}:
            real.kubectl("wait", "--for=condition=Ready", "pod", "--all", "-n", str(namespace), "--timeout=60s")
        yield found


@pytest.fixture(scope="module")
def addresses(real: Cluster, ends: dict[str, End]) -> dict[str, str]:
    bodies = {name: real.get("pod", name, "-n", str(end.namespace)) for name, end in ends.items()}
    return {name: body["status"]["podIP"] for name, body in bodies.items()}


@pytest.fixture(scope="module")
def enforcement(real: Cluster, ends: dict[str, End]) -> Iterator[None]:
    with enforced(this_cache(), lambda message: None):
        yield


def _pod(name: str, end: End) -> dict:
    ports = [{"name": port_name, "containerPort": port} for port_name, port in end.ports.items()]
    main = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", SERVER, *map(str, end.ports.values())],
        "ports": ports,
        "readinessProbe": {"tcpSocket": {"port": "random"}, "periodSeconds": 1},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": end.namespace, "labels": dict(end.labels)},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [main]},
    }


def reached(real: Cluster, ends: dict[str, End], addresses: dict[str, str]) -> set[tuple[str, str, int]]:
    """Return every (source, target, port) that gets through."""
    places = {f"{address}:{port}": (name, port) for name, address in addresses.items() for port in PORTS.values()}

    def from_one(source: str) -> set[tuple[str, str, int]]:
        where = ["-n", str(ends[source].namespace), source]
        said = real.kubectl("exec", *where, "--", "python", "-c", CLIENT, *places)
        return {(source, *places[place]) for place in said.split() if places[place][0] != source}

    with ThreadPoolExecutor(len(ends)) as pool:
        return set().union(*pool.map(from_one, ends))


def expected(policies: list[dict], ends: dict[str, End]) -> set[tuple[str, str, int]]:
    return {
        (one, other, port)
        for one, source in ends.items()
        for other, target in ends.items()
        for port in PORTS.values()
        if one != other and allows(policies, source, target, port)
    }


@pytest.mark.parametrize(
    ("allowed", "routers"),
    [(None, 1), ("monitoring", 1), ("monitoring", 0)],
    ids=["default", "a namespace named", "a router of the user's own"],
)
def test_exactly_those_connections_get_through_that_the_policies_allow(
    real: Cluster, ends: dict[str, End], addresses: dict[str, str], enforcement: None, allowed: str | None, routers: int
):
    models = str(ends["prefill"].namespace)
    stated = {} if allowed is None else {"allowedNamespaces": [ends["prometheus"].namespace]}
    found = Spec.model_validate(spec(networkPolicy=stated, router={"replicas": routers}))
    context = Context("chat", models, found, IMAGE, operator_namespace=ends["operator"].namespace)
    policies = [each for each in (build_engine_policy(context), build_router_policy(context)) if each is not None]
    assert len(policies) == (2 if allowed is not None and routers else 1)
    wanted = expected(policies, ends)
    assert ("stranger", "prefill", 8000) not in wanted
    assert (("neighbour", "prefill", 8998) in wanted) is (routers == 0)
    real.apply(*policies)
    # The program learns of a policy by its watch.
    wait_for("the policies hold", lambda: reached(real, ends, addresses) == wanted, 60)
    document = json.dumps({"apiVersion": "v1", "kind": "List", "items": policies})
    real.kubectl("delete", "-n", models, "-f", "-", input=document)
    everything = expected([], ends)
    wait_for("without policies everyone gets through", lambda: reached(real, ends, addresses) == everything, 60)
