"""Examples and whole objects of the documentation, before the real API server and the webhook as its pod runs it.

Every example, every object of a page and every manifest that an example becomes is taken; every example of a refusal is
refused, in the words that the rules have for it. Nothing is stored.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dcp_operator.api.load import load
from dcp_operator.build import render
from dcp_operator.cli.documents import read_files
from dcp_operator.rules import check_body
from tests.support.cluster import Cluster, cluster
from tests.support.leader_worker_sets import leader_worker_sets
from tests.support.markdown import ROOT, blocks, pages
from tests.support.operator_process import Webhook, webhook, without_release
from tests.support.release import kubectl

EXAMPLES = sorted(Path("examples").glob("*.yaml"))
REFUSED = sorted(Path("examples/refused").glob("*.yaml"))
#: KEDA isn't in the cluster; tests/unit/test_autoscaler_examples.py holds what these point at.
NOT_SERVED = {"ScaledObject"}


def objects_of(page: Path) -> list[dict[str, Any]]:
    """Return the whole objects that a page shows."""
    found = [yaml.safe_load_all(block.text) for block in blocks(page.read_text()) if block.language == "yaml"]
    documents = [each for several in found for each in several if isinstance(each, dict)]
    return [each for each in documents if "kind" in each and each["kind"] not in NOT_SERVED]


SHOWN = [(page, number) for page in pages() for number in range(len(objects_of(page)))]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with (
        without_release(cluster(), image=False) as found,
        # An example has an engine of several nodes, and its manifests are LeaderWorkerSet's to judge.
        leader_worker_sets(found, tmp_path_factory.mktemp("lws")),
    ):
        yield found


@pytest.fixture(scope="module")
def namespace(real: Cluster) -> Iterator[str]:
    with real.namespace("examples") as name:
        yield name


@pytest.fixture(scope="module", autouse=True)
def admission(real: Cluster, namespace: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Webhook]:
    """Without its answer nothing of ours is taken in the namespace."""
    with webhook(real, tmp_path_factory.mktemp("webhook"), namespace) as found:
        yield found


def dry_run(namespace: str, text: str) -> subprocess.CompletedProcess[str]:
    """Apply as a user does, without storing anything."""
    return kubectl("apply", "--dry-run=server", "--namespace", namespace, "--filename", "-", check=False, stdin=text)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_accepted_as_it_is(namespace: str, path: Path):
    result = dry_run(namespace, path.read_text())
    assert (result.returncode, result.stderr) == (0, ""), "taken, and without a warning"
    assert result.stdout.count("created (server dry run)") == len([*yaml.safe_load_all(path.read_text())])


@pytest.mark.parametrize(("page", "number"), SHOWN, ids=lambda part: getattr(part, "stem", part))
def test_an_object_of_the_documentation_is_accepted_as_it_is(namespace: str, page: Path, number: int):
    result = dry_run(namespace, json.dumps(objects_of(page)[number]))
    assert (result.returncode, result.stderr) == (0, ""), "taken, and without a warning"
    assert "created (server dry run)" in result.stdout


def test_the_documentation_shows_objects():
    assert {page.relative_to(ROOT).name for page, _ in SHOWN} >= {"README.md", "drain-and-protect.md", "scale.md"}


@pytest.mark.parametrize("path", REFUSED, ids=lambda path: path.stem)
def test_an_example_of_a_refusal_is_refused_in_the_words_of_its_rule(namespace: str, path: Path):
    result = dry_run(namespace, path.read_text())
    assert result.returncode == 1
    assert result.stdout == ""
    (document,) = read_files([str(path)]).documents
    (finding,) = check_body(document.body).violations
    # The definition's own rules name fewer of the values that work than the webhook does.
    sentence, _, _ = finding.message.partition("; nearest that work")
    assert f"{finding.path}: {sentence}" in result.stderr
    assert f"[{finding.rule}]" in result.stderr


def test_what_only_the_webhook_can_judge_is_refused_by_it(namespace: str):
    said = {path.stem: dry_run(namespace, path.read_text()).stderr for path in REFUSED}
    asked = {name for name, words in said.items() if 'admission webhook "validate.dcpdisagg.io" denied' in words}
    assert {"argument-contradicts-a-field", "privileged-container"} <= asked
    assert asked < set(said), "the definition's own rules refuse the others, with and without the webhook"


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
