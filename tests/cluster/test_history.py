"""The history of an object on the real API server, with the real `dcpctl rollout`."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.cluster import Cluster
from tests.support.operator_process import (
    Process,
    apply_as_user,
    stand_in,
    wait_for,
)

DCPCTL = Path(sys.executable).with_name("dcpctl")
READY_S = 60.0
REACTION_S = 20.0


def labelled(value: str) -> dict:
    """An object whose router has a label: what differs costs no engine."""
    router = {"replicas": 1, "template": {"metadata": {"labels": {"try": value}}}}
    return stand_in("chat", router=router, revisionHistoryLimit=2, drainTimeoutSeconds=1)


def rollout(real: Cluster, namespace: str, *arguments: str) -> subprocess.CompletedProcess:
    action, *rest = arguments
    return subprocess.run(
        [DCPCTL, "rollout", action, "chat", "-n", namespace, *rest],
        env={**os.environ, "KUBECONFIG": str(real.kubeconfig)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def kept(real: Cluster, namespace: str) -> list[tuple[int, str]]:
    """Return the numbers that are kept, with the router's label of each."""
    found = real.get("controllerrevisions", "-n", namespace, "-l", "dcpdisagg.io/name=chat")["items"]
    read = [
        (body["revision"], body["data"]["spec"]["router"]["template"]["metadata"]["labels"]["try"]) for body in found
    ]
    return sorted(read)


def become(real: Cluster, namespace: str, value: str, history: list[tuple[int, str]]) -> None:
    apply_as_user(real, namespace, labelled(value))
    wait_for(f"the history after {value}", lambda: kept(real, namespace) == history, REACTION_S)


def label(real: Cluster, namespace: str) -> str:
    return real.get("dcpd", "chat", "-n", namespace)["spec"]["router"]["template"]["metadata"]["labels"]["try"]


def test_states_are_numbered_bounded_reused_and_undone(real: Cluster, namespace: str, operator: Process) -> None:
    become(real, namespace, "one", [(1, "one")])
    waited = rollout(real, namespace, "status", "--timeout", "60s")
    assert waited.returncode == 0, waited.stderr
    assert "is rolled out" in waited.stdout

    become(real, namespace, "two", [(1, "one"), (2, "two")])
    become(real, namespace, "one", [(2, "two"), (3, "one")])
    become(real, namespace, "three", [(2, "two"), (3, "one"), (4, "three")])
    become(real, namespace, "four", [(3, "one"), (4, "three"), (5, "four")])

    shown = rollout(real, namespace, "history")
    assert shown.returncode == 0, shown.stderr
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["NUMBER", "3", "4", "5"]
    assert shown.stdout.splitlines()[-1].startswith("5 (now)")
    assert "router: template" in shown.stdout

    unchanged = rollout(real, namespace, "undo", "--to-revision", "3", "--dry-run", "client")
    assert (unchanged.returncode, label(real, namespace)) == (0, "four")
    undone = rollout(real, namespace, "undo", "--to-revision", "3")
    assert (undone.returncode, label(real, namespace)) == (0, "one"), undone.stderr
    wait_for(
        "the state has the newest number",
        lambda: kept(real, namespace) == [(4, "three"), (5, "four"), (6, "one")],
        REACTION_S,
    )
    again = rollout(real, namespace, "undo", "--to-revision", "6")
    assert again.returncode == 1
    assert "asks for state 6 already" in again.stderr
    assert rollout(real, namespace, "status", "--timeout", "60s").returncode == 0


def test_undo_keeps_numbers_and_a_pause_holds_it_until_resumed(
    real: Cluster, namespace: str, operator: Process
) -> None:
    manifest = labelled("five")
    manifest["spec"]["prefill"]["extraArgs"] = ["--seed=7"]
    manifest["spec"]["router"]["replicas"] = 2
    apply_as_user(real, namespace, manifest)
    assert rollout(real, namespace, "status", "--timeout", "90s").returncode == 0
    assert kept(real, namespace)[-1] == (7, "five")
    assert rollout(real, namespace, "pause").stdout == f"{namespace}/chat is paused\n"
    undone = rollout(real, namespace, "undo")
    assert undone.returncode == 0, undone.stderr
    assert "once spec.paused is false" in undone.stdout
    spec = real.get("dcpd", "chat", "-n", namespace)["spec"]
    assert (label(real, namespace), spec["router"]["replicas"], spec["paused"]) == ("one", 2, True)
    assert "extraArgs" not in spec["prefill"] or spec["prefill"]["extraArgs"] == []
    held = rollout(real, namespace, "status", "--timeout", "20s")
    assert held.returncode == 1
    assert "paused" in held.stderr
    assert kept(real, namespace)[-1] == (7, "five"), "nothing is recorded while rollouts are held"
    assert rollout(real, namespace, "resume").returncode == 0
    assert rollout(real, namespace, "status", "--timeout", "90s").returncode == 0
    assert kept(real, namespace)[-1] == (8, "one")


def test_an_object_that_is_not_there_is_said_in_words(real: Cluster, namespace: str) -> None:
    missing = subprocess.run(
        [DCPCTL, "rollout", "undo", "nope", "-n", namespace],
        env={**os.environ, "KUBECONFIG": str(real.kubeconfig)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert missing.returncode == 2
    assert f"there is no DCPDisaggDeployment nope in namespace {namespace}" in missing.stderr
    assert "Traceback" not in missing.stderr


def test_a_deleted_object_takes_its_history_along(real: Cluster, namespace: str, operator: Process) -> None:
    real.kubectl("delete", "dcpd", "chat", "-n", namespace)
    wait_for("the history is gone", lambda: kept(real, namespace) == [], READY_S)
