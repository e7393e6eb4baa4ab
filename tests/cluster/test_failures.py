"""Failures produced for real on the cluster: the same word in condition, event, log and metric, and words that help."""

import copy
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.operator_process import (
    Process,
    apply_as_user,
    conditions,
    controller,
    stand_in,
    wait_for,
)
from tests.support.ports import free_port
from tests.support.stand_ins import tell

SAID_S = 90.0
#: What real vLLM said that did not find its weights: more than Kubernetes keeps of a log.
VLLM_END = (Path(__file__).parents[1] / "unit" / "vllm_ends" / "no-weights.txt").read_text()
#: No node has any.
DEVICE = "example.com/no-such-device"


def container(**changes: Any) -> dict[str, Any]:
    """Decode's fields with a container main that is changed."""
    template = copy.deepcopy(stand_in()["spec"]["decode"]["template"])
    template["spec"]["containers"][0] |= changes
    return {"template": template}


def writes_and_ends(text: str) -> list[str]:
    return ["python", "-c", f"import sys; sys.stderr.write({text!r}); sys.exit(1)"]


#: object -> (what makes it, reason of DecodeReady, words of its message)
OBJECTS: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "no-room": (
        {"decode": container(resources={"limits": {DEVICE: "3"}, "requests": {DEVICE: "3"}})},
        "Unschedulable",
        [f"too little {DEVICE} is free, of which it asks for 3 in container main", f"Insufficient {DEVICE}"],
    ),
    "no-image": (
        {"decode": {"image": "registry.invalid/acme/none:1"}},
        "ImagePullFailed",
        ["registry.invalid/acme/none:1", "pull secrets"],
    ),
    "no-weights": (
        {"decode": container(command=writes_and_ends(VLLM_END))},
        "ModelLoadFailed",
        ["Cannot find any model weights with `/models/no", "fetch the model again", "logs no-weights-decode"],
    ),
    "bad-flag": (
        {"decode": container(command=writes_and_ends("ValueError: the KV cache is a MambaSpec\n"))},
        "CrashLoop",
        ["ValueError: the KV cache is a MambaSpec", "exit code 1"],
    ),
    "no-secret": (
        {"decode": container(envFrom=[{"secretRef": {"name": "not-there"}}])},
        "ContainerRefused",
        ['secret "not-there" not found'],
    ),
    "mute": ({}, "ProbeFailed", ["readiness probe fails"]),
}


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def operator(
    real: Cluster, namespace: str, metrics_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("controller")
    with controller(real, folder, namespace, DCP_METRICS_PORT=str(metrics_port)) as process:
        for name, (parts, *_) in OBJECTS.items():
            # One role fails: the other and the router would only cost time.
            others = {} if name == "mute" else {"prefill": {"replicas": 0}, "router": {"replicas": 0}}
            apply_as_user(real, namespace, stand_in(name, **{**others, **parts}))
        yield process


def said(real: Cluster, namespace: str, name: str, kind: str) -> dict[str, Any]:
    return conditions(real.get("dcpd", name, "-n", namespace)).get(kind, {})


@pytest.mark.parametrize("name", OBJECTS)
def test_the_reason_is_found_and_said_everywhere_with_one_word(
    real: Cluster, namespace: str, operator: Process, metrics_port: int, name: str
):
    _, reason, words = OBJECTS[name]
    if name == "mute":
        wait_for("it is ready", lambda: said(real, namespace, name, "Ready").get("status") == "True", SAID_S)
        selector = f"dcpdisagg.io/name={name},dcpdisagg.io/role=decode"
        (pod,) = real.get("pods", "-n", namespace, "-l", selector)["items"]
        tell(real, namespace, pod["metadata"]["name"], unready="told to be")

    def found() -> dict[str, Any] | None:
        condition = said(real, namespace, name, "DecodeReady")
        complete = all(word in condition.get("message", "") for word in words)
        return condition if condition.get("reason") == reason and complete else None

    try:
        condition = wait_for(f"{name} is {reason}", found, SAID_S)
    except AssertionError as error:
        now = said(real, namespace, name, "DecodeReady")
        raise AssertionError(f"{error}\n{now}\n{operator.said()[-2000:]}") from None
    assert condition["status"] == "False"
    if name != "mute":
        # Prefill was given no engines, which is said too; what fails comes first.
        assert said(real, namespace, name, "Ready")["reason"] == reason

    def is_recorded() -> bool:
        items = real.get("events", "-n", namespace)["items"]
        return any(
            item["reason"] == reason and item["type"] == "Warning" and item["involvedObject"]["name"] == name
            for item in items
        )

    wait_for("the event is recorded", is_recorded, 10)
    assert any(reason in line and f"{namespace}/{name}" in line for line in operator.said().splitlines())
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    assert re.search(rf'^dcp_operator_objects\{{.*reason="{reason}".*\}} [1-9]', page, re.MULTILINE), page[:3000]
