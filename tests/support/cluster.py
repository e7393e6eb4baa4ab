"""The real cluster for tests: brought up once, shared by all, spoken to with the real kubectl and helm."""

import functools
import json
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from devcluster.errors import DevClusterError
from devcluster.paths import CHECKOUT, this_cache
from devcluster.tools import Tools

_UP_TIMEOUT_S = 3600  # a first start builds Kubernetes


def devcluster(*arguments: str, cwd: Path = CHECKOUT, timeout_s: float = _UP_TIMEOUT_S) -> subprocess.CompletedProcess:
    """Run ``python -m devcluster`` as a user would; the caller looks at the result."""
    return subprocess.run(
        [sys.executable, "-m", "devcluster", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=timeout_s,
        check=False,
    )


def up() -> str:
    """Bring the cluster up, or repair it. Returns what was printed."""
    result = devcluster("up")
    assert result.returncode == 0, f"devcluster up failed:\n{result.stderr}"
    return result.stderr


def copy_checkout(target: Path) -> Path:
    """A second checkout, with no more than what ``devcluster up`` reads. Returns its folder."""
    for folder in ("devcluster", "tests/engine_plugin"):
        shutil.copytree(CHECKOUT / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__", ".venv"))
    return target


@dataclass(frozen=True, slots=True)
class Cluster:
    """The running cluster. A failing command is an AssertionError with the program's own words."""

    kubeconfig: Path
    _tools: Tools = field(repr=False)

    def kubectl(self, *arguments: str | Path, input: str | None = None, timeout_s: float = 120.0) -> str:  # noqa: A002 - as in subprocess
        """Run kubectl and return its standard output."""
        try:
            return self._tools.kubectl(*arguments, stdin=input, timeout_s=timeout_s)
        except DevClusterError as error:
            raise AssertionError(str(error)) from None

    def helm(self, *arguments: str | Path, timeout_s: float = 300.0) -> str:
        """Run helm and return its standard output."""
        try:
            return self._tools.helm(*arguments, timeout_s=timeout_s)
        except DevClusterError as error:
            raise AssertionError(str(error)) from None

    def get(self, *arguments: str) -> dict[str, Any]:
        """Return what ``kubectl get ... -o json`` says."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def apply(self, *manifests: dict[str, Any], namespace: str | None = None) -> None:
        """Apply objects, server-side, as one list."""
        document = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
        where = ["-n", namespace] if namespace else []
        self.kubectl("apply", "--server-side", "--field-manager=tests", *where, "-f", "-", input=document)

    @contextmanager
    def namespace(self, prefix: str = "test", labels: dict[str, str] | None = None) -> Iterator[str]:
        """A namespace of its own name, deleted with everything in it afterwards."""
        name = f"{prefix}-{uuid.uuid4().hex[:8]}"
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels or {}}})
        try:
            yield name
        finally:
            # Once a pod ends with its own grace period, which is minutes for an engine, a shorter one comes too late.
            for kinds in ("deployments", "replicasets"):
                self.kubectl("delete", kinds, "--all", "-n", name, "--cascade=orphan")
            self.kubectl("delete", "pods", "--all", "-n", name, "--grace-period=1", "--wait=false")
            self.kubectl("delete", "namespace", name, "--wait=false")
            self.kubectl("wait", "--for=delete", f"namespace/{name}", "--timeout=180s", timeout_s=190)


@functools.cache
def cluster() -> Cluster:
    """The cluster, brought up by the first caller."""
    up()
    cache = this_cache()
    return Cluster(cache.cluster.kubeconfig, Tools(cache))


@contextmanager
def namespace(prefix: str = "test") -> Iterator[str]:
    """A namespace in the cluster, deleted afterwards."""
    with cluster().namespace(prefix) as name:
        yield name
