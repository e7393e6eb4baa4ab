"""Real Helm for the tests: renders, lints and installs the chart. The programs come from the local cluster's cache."""

import functools
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from devcluster.clients import ensure_clients
from devcluster.paths import this_cache
from devcluster.progress import Progress

CHART = Path(__file__).resolve().parents[2] / "charts" / "dcp-disagg"

Manifest = dict[str, Any]


@functools.cache
def clients() -> Path:
    """Return the folder with helm and kubectl, fetched where the cache lacks them."""
    return ensure_clients(this_cache(), Progress())


def run_client(
    program: str, *arguments: str | Path, check: bool = True, stdin: str | None = None, kubeconfig: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run helm or kubectl; with `check`, a failure raises with what the program said."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HELM_")}
    # Without a cluster asked for, none may be reached by accident.
    environment["KUBECONFIG"] = str(kubeconfig or os.devnull)
    command = [str(clients() / program), *map(str, arguments)]
    result = subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment, timeout=300)
    if check and result.returncode != 0:
        raise AssertionError(f"{' '.join(command)} ended with {result.returncode}:\n{result.stdout}\n{result.stderr}")
    return result


def render(
    values: Mapping[str, Any] | None = None,
    *,
    release: str = "rel",
    namespace: str = "home",
    kinds: Sequence[str] = (),
) -> list[Manifest]:
    """Return every manifest of `helm template`, without a cluster. `kinds` (GROUP/VERSION/KIND) are known there too."""
    known = [f"--api-versions={kind}" for kind in kinds]
    done = run_client("helm", *_template(release, namespace), *known, "--values", "-", stdin=json.dumps(values or {}))
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def refusal(values: Mapping[str, Any]) -> str:
    """Return what Helm says about values that it must refuse."""
    done = run_client("helm", *_template("rel", "home"), "--values", "-", stdin=json.dumps(values), check=False)
    assert done.returncode != 0, f"Helm took {values}"
    return done.stderr


def _template(release: str, namespace: str) -> Sequence[str | Path]:
    return ("template", release, CHART, "--namespace", namespace)


def only(manifests: Sequence[Manifest], kind: str, suffix: str = "") -> Manifest:
    """Return the one manifest of a kind whose name ends so."""
    found = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"].endswith(suffix)]
    assert len(found) == 1, [m["metadata"]["name"] for m in found]
    return found[0]
