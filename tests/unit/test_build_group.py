"""The LeaderWorkerSet of a role whose engines span several pods, and who selects its pods."""

from typing import Any

import pytest

from dcp_operator import names
from dcp_operator.api.spec import Spec
from dcp_operator.build import render
from tests.support.objects import spec

MULTINODE = {"nodeCount": 2, "annotations": {"scheduling.example.com/gang": "yes"}}


def rendered(**changes: Any) -> dict[tuple[str, str], dict[str, Any]]:
    stated = spec(**{key: value for key, value in changes.items() if key != "decode"})
    stated["decode"] = {**stated["decode"], "multinode": MULTINODE, **changes.get("decode", {})}
    loaded = Spec.model_validate(stated)
    found = render("chat", "models", loaded, operator_image="acme/operator:1")
    return {(each["kind"], each["metadata"]["name"].rpartition("-")[0]): each for each in found}


def group(**changes: Any) -> dict[str, Any]:
    return rendered(**changes)["LeaderWorkerSet", "chat-decode"]


def templates(manifest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    of_group = manifest["spec"]["leaderWorkerTemplate"]
    return of_group["leaderTemplate"], of_group["workerTemplate"]


def main_of(template: dict[str, Any]) -> dict[str, Any]:
    return template["spec"]["containers"][0]


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector takes a pod."""
    listed = all(labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", []))
    return listed and selector.get("matchLabels", {}).items() <= labels.items()


def test_a_group_is_one_replica_and_leaves_nothing_to_be_defaulted():
    manifest = group(decode={"replicas": 3})
    stated = manifest["spec"]
    assert (stated["replicas"], stated["leaderWorkerTemplate"]["size"]) == (3, 2)
    assert stated["leaderWorkerTemplate"]["restartPolicy"] == "None"
    assert stated["startupPolicy"] == "LeaderCreated"
    assert stated["networkConfig"] == {"subdomainPolicy": "Shared"}
    assert stated["rolloutStrategy"]["rollingUpdateConfiguration"] == {
        "partition": 0,
        "maxSurge": 1,
        "maxUnavailable": 0,
    }
    assert ("Deployment", "chat-decode") not in rendered()
    assert ("Deployment", "chat-prefill") in rendered()


def test_both_kinds_of_pods_are_told_the_same_but_for_their_place():
    leader, worker = (main_of(template) for template in templates(group()))
    nodes = ["--nnodes=2", "--node-rank=0", "--master-addr=$(LWS_LEADER_ADDRESS)", "--master-port=29501"]
    assert [arg for arg in leader["args"] if arg.startswith(("--nn", "--node", "--master"))] == nodes
    moved = ["--node-rank=$(LWS_WORKER_INDEX)" if arg == "--node-rank=0" else arg for arg in leader["args"]]
    assert worker["args"] == [*moved, "--headless"]
    assert leader["command"][-1] == "vllm.entrypoints.openai.api_server"
    assert worker["command"] == ["python3", "-m", "vllm.entrypoints.cli.main", "serve"]
    assert worker["env"] == leader["env"]
    assert worker["volumeMounts"] == leader["volumeMounts"]


def test_each_pod_has_its_part_of_the_accelerators():
    stated = group(accelerator={"resourceName": "nvidia.com/gpu"})
    for template in templates(stated):
        assert main_of(template)["resources"]["limits"] == {"nvidia.com/gpu": "1"}


def test_only_the_leader_serves_and_is_probed():
    leader, worker = (main_of(template) for template in templates(group()))
    probes = {"startupProbe", "readinessProbe", "livenessProbe"}
    assert probes <= set(leader)
    assert not probes & set(worker)
    assert {port["name"] for port in leader["ports"]} == {"http", "kv-bootstrap"}
    assert "ports" not in worker


def test_a_worker_drains_with_its_leader():
    leader, worker = (main_of(template)["lifecycle"]["preStop"]["exec"]["command"] for template in templates(group()))
    assert [word for word in worker if word not in leader] == ["--host-variable=LWS_LEADER_ADDRESS"]


def test_what_the_template_says_of_a_container_holds_for_both():
    hook = {"exec": {"command": ["mine"]}}
    main = {
        "name": "main",
        "command": ["start-engine"],
        "lifecycle": {"preStop": hook},
        "ports": [{"name": "debug", "containerPort": 9999}],
    }
    template = {
        "metadata": {"labels": {"team": "a"}},
        "spec": {"containers": [main], "schedulerName": "volcano", "priorityClassName": "high"},
    }
    for made in templates(group(decode={"template": template})):
        container = main_of(made)
        assert container["command"] == ["start-engine"]
        assert container["lifecycle"]["preStop"] == hook
        assert "debug" in {port["name"] for port in container["ports"]}
        assert made["metadata"]["labels"]["team"] == "a"
        assert (made["spec"]["schedulerName"], made["spec"]["priorityClassName"]) == ("volcano", "high")


def test_annotations_go_to_the_set_and_its_pods():
    manifest = group()
    for metadata in (manifest["metadata"], *(template["metadata"] for template in templates(manifest))):
        assert metadata["annotations"]["scheduling.example.com/gang"] == "yes"


def test_a_worker_is_no_engine_to_those_who_select_engines():
    everything = rendered(decode={"replicas": 2})
    manifest = everything["LeaderWorkerSet", "chat-decode"]
    leader, worker = (template["metadata"]["labels"] for template in templates(manifest))
    revision = manifest["metadata"]["labels"][names.LABEL_REVISION]
    for role in ("prefill", "decode"):
        for selector in (names.selector("chat", role), names.selector("chat", role, revision)):
            assert not selector.items() <= worker.items()
    assert names.selector("chat", "decode", revision).items() <= leader.items()
    assert names.LABEL_LLMD_ROLE not in worker
    service = everything["Service", ""]["spec"]["selector"]
    assert not service.items() <= worker.items()
    # Who counts pods, and who lets them talk to one another, has to know of all.
    budget = everything["PodDisruptionBudget", "chat"]["spec"]["selector"]
    policy = everything["NetworkPolicy", "chat"]["spec"]
    (peer,) = policy["ingress"][0]["from"]
    for labels in (leader, worker):
        assert selects(budget, labels)
        assert selects(policy["podSelector"], labels)
        assert selects(peer["podSelector"], labels)


@pytest.mark.parametrize(
    ("strategy", "replicas", "possible"),
    [
        ({"maxSurge": 0, "maxUnavailable": "10%"}, 3, (0, 1)),
        ({"maxSurge": "0%", "maxUnavailable": "50%"}, 4, ("0%", 2)),
        ({"maxSurge": "25%", "maxUnavailable": 0}, 1, ("25%", 0)),
        ({"maxSurge": 1, "maxUnavailable": "10%"}, 1, (1, "10%")),
    ],
)
def test_a_percentage_of_few_groups_is_at_least_one_of_them(
    strategy: dict[str, Any], replicas: int, possible: tuple[Any, Any]
):
    stated = group(rolloutStrategy=strategy, decode={"replicas": replicas})["spec"]["rolloutStrategy"]
    bounds = stated["rollingUpdateConfiguration"]
    assert (bounds["maxSurge"], bounds["maxUnavailable"]) == possible


def test_the_number_of_nodes_makes_another_revision_and_the_number_of_groups_does_not():
    def revision(**decode: Any) -> str:
        return group(decode=decode)["metadata"]["name"]

    assert revision(replicas=1) == revision(replicas=2)
    assert revision() != revision(multinode={"nodeCount": 4})
