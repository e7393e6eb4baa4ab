"""Every example, and every manifest that it becomes, is taken by the real API server."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dcp_operator.api.load import load
from dcp_operator.build import render
from dcp_operator.cli.documents import read_files
from tests.support.cluster import Cluster, cluster
from tests.support.leader_worker_sets import leader_worker_sets
from tests.support.operator_process import install_crd
from tests.support.release import kubectl
from tests.support.specimens import merged

EXAMPLES = sorted(Path("examples").glob("*.yaml"))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = cluster()
    install_crd(found)
    # An example has an engine of several nodes, and its manifests are LeaderWorkerSet's to judge.
    with leader_worker_sets(found, tmp_path_factory.mktemp("lws")):
        yield found


@pytest.fixture(scope="module")
def namespace(real: Cluster) -> Iterator[str]:
    with real.namespace("examples") as name:
        yield name


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_accepted_as_it_is(real, namespace, path):
    out = real.kubectl("apply", "--dry-run=server", "--namespace", namespace, "--filename", path)
    assert "created (server dry run)" in out


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_manifest_of_an_example_is_accepted(real, namespace, path):
    for document in read_files([str(path)]).documents:
        obj = load(document.body).obj
        assert obj is not None
        manifests = render(obj.metadata.name, namespace, obj.spec, operator_image="example.com/operator:1")
        real.kubectl(
            "apply",
            "--server-side",
            "--dry-run=server",
            "--validate=strict",
            "--filename",
            "-",
            input=json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}),
        )


def test_a_changed_example_is_refused_so_that_the_test_above_means_something(namespace):
    body = yaml.safe_load(Path("examples/minimal.yaml").read_text())
    broken = merged(body, {"spec": {"decode": {"parallelism": {"tensor": 8, "decodeContext": 3}}}})
    command = ["apply", "--dry-run=server", "--namespace", namespace, "--filename", "-"]
    result = kubectl(*command, stdin=json.dumps(broken), check=False)
    assert result.returncode == 1
    assert "[dcp-divides-tp]" in result.stderr
