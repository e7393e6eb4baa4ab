"""Fixtures of the end-to-end tests: the line in the local cluster, and engines outside it."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from devcluster import release
from devcluster.engine import environment
from devcluster.paths import CHECKOUT, this_cache
from devcluster.progress import Progress
from devcluster.workloads import models_claim
from tests.support.engines import engine_pool
from tests.support.line import Line

__all__ = ["engine_pool", "line"]

_NAMESPACE = "dcp-e2e"


@pytest.fixture(scope="session")
def line() -> Iterator[Line]:
    """The running cluster with this checkout's operator installed, and an empty namespace that holds the models."""
    cache, log = this_cache(), Progress()
    # A process of its own, as for a user: the node's components are not the tests' children.
    subprocess.run([sys.executable, "-m", "devcluster", "up", "--with-engine"], cwd=CHECKOUT, check=True)
    models = environment.ensure_models(cache.root, log)
    tools = release.deploy(cache, log)
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": _NAMESPACE}}
    around = {"apiVersion": "v1", "kind": "List", "items": [namespace, *models_claim(_NAMESPACE, models)]}
    tools.kubectl("apply", "-f", "-", stdin=json.dumps(around))
    try:
        yield Line(tools, _NAMESPACE, log)
    finally:
        tools.kubectl("delete", "namespace", _NAMESPACE, "--ignore-not-found", timeout_s=180)
        tools.kubectl("delete", "persistentvolume", f"dcp-models-{_NAMESPACE}", "--ignore-not-found")
