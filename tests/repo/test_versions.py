"""One version, stated in pyproject.toml: the chart, the image and the changelog agree with it."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import yaml

from tests.support.helm import render

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_installed_package_is_of_this_version() -> None:
    assert importlib.metadata.version("dcp-disagg") == VERSION


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((ROOT / "charts/dcp-disagg/Chart.yaml").read_text())
    assert chart["version"] == VERSION
    assert chart["appVersion"] == VERSION


def test_the_chart_runs_the_image_of_this_version() -> None:
    containers = [
        container
        for manifest in render()
        if manifest["kind"] == "Deployment"
        for container in manifest["spec"]["template"]["spec"]["containers"]
    ]
    assert containers
    assert {container["image"] for container in containers} == {f"dcp-disagg/operator:{VERSION}"}


def test_the_local_cluster_builds_the_image_that_the_chart_runs() -> None:
    from devcluster.release import operator_image

    assert operator_image() == f"dcp-disagg/operator:{VERSION}"


def test_the_image_holds_the_router_that_the_design_was_measured_with() -> None:
    requirements = (ROOT / "docker/requirements.txt").read_text()
    assert re.findall(r"^vllm-router==(\S+)", requirements, re.MULTILINE) == ["0.1.17"]


def test_every_requirement_of_the_image_has_a_hash() -> None:
    for path in sorted((ROOT / "docker").glob("requirements*.txt")):
        joined = path.read_text().replace("\\\n", " ")
        lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
        assert lines
        assert [line for line in lines if "--hash=sha256:" not in line] == []
