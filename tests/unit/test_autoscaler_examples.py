"""Autoscalers in examples and documentation point at scalers that the operator makes, and stay within its bounds."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from dcp_operator.api.load import load
from dcp_operator.build import render
from dcp_operator.kinds import SCALER
from tests.support.markdown import ROOT, blocks, pages

Body = dict[str, Any]


def documents(path: Path) -> list[Body]:
    text = path.read_text()
    if path.suffix == ".yaml":
        return [each for each in yaml.safe_load_all(text) if isinstance(each, dict)]
    found = [yaml.safe_load_all(block.text) for block in blocks(text) if block.language == "yaml"]
    return [each for several in found for each in several if isinstance(each, dict)]


def autoscalers(path: Path) -> list[Body]:
    return [each for each in documents(path) if "scaleTargetRef" in each.get("spec", {})]


PLACES = [path for path in (*sorted((ROOT / "examples").glob("*.yaml")), *pages()) if autoscalers(path)]


def test_there_are_examples_of_both_kinds_of_autoscaler():
    assert {each["kind"] for path in PLACES for each in autoscalers(path)} == {
        "HorizontalPodAutoscaler",
        "ScaledObject",
    }


@pytest.mark.parametrize("path", PLACES, ids=lambda path: path.name)
def test_an_autoscaler_points_at_a_scaler(path: Path):
    for each in autoscalers(path):
        target = each["spec"]["scaleTargetRef"]
        assert (target["apiVersion"], target["kind"]) == (SCALER.api_version, SCALER.kind)
        assert target["name"].endswith(("-prefill", "-decode"))


@pytest.mark.parametrize("path", [path for path in PLACES if path.suffix == ".yaml"], ids=lambda path: path.name)
def test_an_autoscaler_of_an_example_finds_its_scaler_and_keeps_to_its_bounds(path: Path):
    bounds: dict[str, tuple[int, int]] = {}
    for document in documents(path):
        obj = load(document).obj if document["kind"] == "DCPDisaggDeployment" else None
        if obj is None:
            continue
        made = render(obj.metadata.name, "models", obj.spec, operator_image="-")
        for name in (each["metadata"]["name"] for each in made if each["kind"] == SCALER.kind):
            scaling = document["spec"][name.rpartition("-")[2]]["scaling"]
            bounds[name] = (scaling.get("minReplicas", 1), scaling["maxReplicas"])
    for each in autoscalers(path):
        low, high = bounds[each["spec"]["scaleTargetRef"]["name"]]
        assert low <= each["spec"]["minReplicas"] <= each["spec"]["maxReplicas"] <= high
