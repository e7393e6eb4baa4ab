"""LeaderWorkerSet in the cluster for as long as a test wants it: definitions, webhooks, and its real controller."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dcp_operator.kinds import LEADER_WORKER_SET
from devcluster import groups
from devcluster.paths import this_cache
from tests.support.cluster import Cluster
from tests.support.operator_process import is_served, wait_for
from tests.support.ports import free_ports

CRD = f"{LEADER_WORKER_SET.plural}.{LEADER_WORKER_SET.group}"


def remove(cluster: Cluster, folder: Path) -> None:
    """Remove what makes LeaderWorkerSets known, and with it every object of theirs."""
    webhooks = groups.webhooks(folder, 1, b"")
    for kind in ("mutatingwebhookconfiguration", "validatingwebhookconfiguration"):
        names = [each["metadata"]["name"] for each in webhooks if each["kind"].lower() == kind]
        cluster.kubectl("delete", kind, *names, "--ignore-not-found")
    names = [each["metadata"]["name"] for each in groups.definitions(folder)]
    cluster.kubectl("delete", "crd", *names, "--ignore-not-found", "--timeout=60s")


@contextmanager
def leader_worker_sets(cluster: Cluster, scratch: Path) -> Iterator[None]:
    """Have LeaderWorkerSets in the cluster; afterwards it does not know them. `scratch` receives keys and the log."""
    cache = this_cache()
    program = groups.ensure_program(cache, print)
    authority = groups.make_certificate(cache.cluster, scratch)
    port, health_port = free_ports(2)
    settings, log = scratch / "lws.yaml", scratch / "lws.log"
    settings.write_text(groups.configuration(scratch, port, health_port))
    # Too large for the annotation of a client-side apply.
    definitions = json.dumps({"apiVersion": "v1", "kind": "List", "items": groups.definitions(program)})
    process: subprocess.Popen[bytes] | None = None
    try:
        cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=definitions)
        wait_for("LeaderWorkerSets are served", lambda: is_served(cluster, CRD), 30)
        # Before the controller, as in any installation: it must never make a pod that its webhook has not seen.
        cluster.apply(*groups.webhooks(program, port, authority))
        with log.open("wb") as output:
            process = subprocess.Popen(
                groups.command(program, settings),
                env=groups.environment(cache.cluster),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        wait_for("LeaderWorkerSet's webhook listens", lambda: _listens(process, log), 60)
        yield
    finally:
        try:
            remove(cluster, program)
        finally:
            if process is not None:
                process.terminate()
                process.wait(30)


def _listens(process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, f"LeaderWorkerSet's controller ended:\n{log.read_text()[-3000:]}"
    return "Serving webhook server" in log.read_text()
