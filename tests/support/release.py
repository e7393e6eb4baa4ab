"""A release of the chart in the local cluster, made and inspected by the real Helm and kubectl."""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from devcluster.paths import this_cache
from tests.support.helm import CHART, Manifest, run_client


def kubectl(*arguments: str, check: bool = True, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run kubectl on the local cluster."""
    return run_client("kubectl", *arguments, check=check, stdin=stdin, kubeconfig=this_cache().cluster.kubeconfig)


def helm(*arguments: str, check: bool = True, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run helm on the local cluster."""
    return run_client("helm", *arguments, check=check, stdin=stdin, kubeconfig=this_cache().cluster.kubeconfig)


def get(*arguments: str) -> Manifest:
    """Return what `kubectl get -o json` says."""
    found: Manifest = json.loads(kubectl("get", *arguments, "--output", "json").stdout)
    return found


def eventually(what: str, holds: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait until something holds; fail with its name when it doesn't in time."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {within_s:.0f} s"
        time.sleep(0.5)


def apply_dry(manifest: Manifest) -> subprocess.CompletedProcess[str]:
    """Ask the API server, and so the webhook, what it thinks of an object, without storing it."""
    return kubectl("apply", "--dry-run=server", "--filename", "-", check=False, stdin=json.dumps(manifest))


@dataclass
class Release:
    """One release: its name, its namespace and the values that it was given last."""

    name: str
    namespace: str
    values: dict[str, Any]

    def install(self, *extra: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `helm install --wait`."""
        return self._run("install", *extra, check=check)

    def upgrade(self, **values: Any) -> subprocess.CompletedProcess[str]:
        """Run `helm upgrade --wait` with further values."""
        self.values |= values
        return self._run("upgrade")

    def _run(self, verb: str, *extra: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = (verb, self.name, str(CHART), "--namespace", self.namespace, "--wait", "--timeout", "180s")
        return helm(*command, "--values", "-", *extra, check=check, stdin=json.dumps(self.values))

    def uninstall(self) -> None:
        """Run `helm uninstall --wait`."""
        helm("uninstall", self.name, "--namespace", self.namespace, "--wait", "--ignore-not-found")


def releases() -> list[Release]:
    """Return every release of this chart in the cluster."""
    listed = json.loads(helm("list", "--all-namespaces", "--output", "json").stdout)
    ours = [entry for entry in listed if entry["chart"].startswith("dcp-disagg-")]
    found: list[Release] = []
    for entry in ours:
        values = helm("get", "values", entry["name"], "--namespace", entry["namespace"], "--output", "json").stdout
        found.append(Release(entry["name"], entry["namespace"], json.loads(values) or {}))
    return found


@contextmanager
def no_other_release() -> Iterator[None]:
    """Take the cluster's releases away and put them back afterwards: two may not manage the same namespaces."""
    before = releases()
    for release in before:
        release.uninstall()
    try:
        yield
    finally:
        for release in before:
            release.install("--create-namespace")


@dataclass
class Caller:
    """Calls the webhook again and again from a thread, and keeps what went wrong."""

    manifest: Manifest
    calls: int = 0
    failures: list[str] = field(default_factory=list[str])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Call until the block ends."""
        done = threading.Event()

        def call() -> None:
            while not done.is_set():
                answer = apply_dry(self.manifest)
                self.calls += 1
                if answer.returncode != 0:
                    self.failures.append(answer.stderr)
                done.wait(0.2)

        thread = threading.Thread(target=call)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
