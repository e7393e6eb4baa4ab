"""Fake nodes: what goes to them and what they do, as documents. That kwok takes them is what the benches show."""

import copy

import yaml

from devcluster import gobuild
from devcluster.fake_nodes import MARK, READY_AFTER, node, place, stages

TEMPLATE = {"metadata": {"labels": {"app": "x"}}, "spec": {"containers": [{"name": "main"}]}}


def test_an_ordinary_pod_does_not_land_on_a_fake_node():
    (taint,) = node("fake-0")["spec"]["taints"]
    assert (taint["key"], taint["effect"]) == (MARK, "NoSchedule")


def test_a_placed_pod_tolerates_the_taint_and_lands_nowhere_else():
    spec = place(TEMPLATE)["spec"]
    (taint,) = node("fake-0")["spec"]["taints"]
    (toleration,) = spec["tolerations"]
    assert {key: toleration[key] for key in taint} == taint
    assert spec["nodeSelector"].items() <= node("fake-0")["metadata"]["labels"].items()
    assert spec["containers"] == TEMPLATE["spec"]["containers"]


def test_the_template_that_is_placed_is_left_as_it_is():
    before = copy.deepcopy(TEMPLATE)
    place(TEMPLATE, 3.0)
    assert before == TEMPLATE


def test_a_pod_is_ready_after_the_time_in_its_annotation():
    annotations = place(TEMPLATE, 1.5)["metadata"]["annotations"]
    assert annotations == {READY_AFTER: "1500ms"}
    delays = [stage["spec"]["delay"] for stage in stages() if "delay" in stage["spec"]]
    assert [delay["durationFrom"]["expressionFrom"] for delay in delays] == [f'.metadata.annotations["{READY_AFTER}"]']
    assert "annotations" not in place(TEMPLATE)["metadata"]


def test_deleted_pods_go_at_once_and_nodes_are_ready():
    by_name = {stage["metadata"]["name"]: stage["spec"] for stage in stages()}
    assert by_name["pod-delete"]["next"] == {"delete": True}
    assert "delay" not in by_name["pod-delete"]
    assert by_name["node-ready"]["resourceRef"]["kind"] == "Node"
    assert yaml.safe_load(yaml.safe_dump(stages())) == stages()


def test_a_cluster_comes_up_without_kwok():
    assert gobuild.KWOK not in gobuild.MODULES
