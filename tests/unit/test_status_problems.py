"""Why pods are not ready, from what Kubernetes says about them: each reason, its words, and which comes first."""

import pytest

from dcp_operator.problems import pod_problem
from dcp_operator.reasons import Reason
from tests.support.objects import pod


def waiting(name: str, reason: str, message: str = "", **more) -> dict:
    return {
        "name": name,
        "image": "acme/engine:1",
        "state": {"waiting": {"reason": reason, "message": message}},
        **more,
    }


def ended(exit_code: int = 1, message: str = "", reason: str = "Error") -> dict:
    return {"terminated": {"exitCode": exit_code, "reason": reason, "message": message}}


RUNNING = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
NO_NODE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
}
TRACE = """\
Traceback (most recent call last):
  File "x.py", line 1, in <module>
ValueError: the KV cache is a MambaSpec
(EngineCore pid=9) exiting
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
NO_CONNECTOR = "ModuleNotFoundError: No module named 'dcp_connector'\n"

#: name -> (component, parts of the pod, reason, what the message must say)
CASES = {
    "image not found": (
        "prefill",
        {"containers": [waiting("main", "ErrImagePull", "manifest unknown")]},
        Reason.IMAGE_PULL_FAILED,
        ["acme/engine:1", "manifest unknown", "imagePullSecrets"],
    ),
    "image pull in its pause": (
        "prefill",
        {
            "containers": [
                waiting(
                    "main", "ImagePullBackOff", 'Back-off pulling image "acme/engine:1": ErrImagePull: manifest unknown'
                )
            ]
        },
        Reason.IMAGE_PULL_FAILED,
        [": manifest unknown."],
    ),
    "a secret that does not exist": (
        "decode",
        {"containers": [waiting("main", "CreateContainerConfigError", 'secret "hf-token" not found')]},
        Reason.CONTAINER_REFUSED,
        ['secret "hf-token" not found'],
    ),
    "engine in a crash loop": (
        "decode",
        {"containers": [waiting("main", "CrashLoopBackOff", lastState=ended(1, TRACE), restartCount=3)]},
        Reason.CRASH_LOOP,
        ["exit code 1 after 3 restarts", "ValueError: the KV cache is a MambaSpec", "logs p -c main --previous"],
    ),
    "engine running again after a crash": (
        "decode",
        {"containers": [{"name": "main", "state": RUNNING, "lastState": ended(1, TRACE), "restartCount": 1}]},
        Reason.CRASH_LOOP,
        ["after 1 restart:", "MambaSpec"],
    ),
    "engine killed for its memory": (
        "decode",
        {"containers": [waiting("main", "CrashLoopBackOff", lastState=ended(137, "", "OOMKilled"), restartCount=1)]},
        Reason.CRASH_LOOP,
        ["exit code 137, reason OOMKilled"],
    ),
    "engine that ends without an error, again and again": (
        "decode",
        {"containers": [waiting("main", "CrashLoopBackOff", lastState=ended(0, "", "Completed"), restartCount=2)]},
        Reason.CRASH_LOOP,
        ["exit code 0, reason Completed"],
    ),
    "image without the connector": (
        "prefill",
        {"containers": [waiting("main", "CrashLoopBackOff", lastState=ended(1, NO_CONNECTOR), restartCount=1)]},
        Reason.CONNECTOR_MISSING,
        ["No module named 'dcp_connector'", "kvConnector.delivery to Inject"],
    ),
    "operator image without the connector": (
        "prefill",
        {
            "init": [
                waiting("connector", "CrashLoopBackOff", lastState=ended(1, "cp: cannot stat '/opt/dcp/connector/.'"))
            ]
        },
        Reason.CONNECTOR_MISSING,
        ["cp: cannot stat", "operator image"],
    ),
    "engine without memory for the model": (
        "decode",
        {"containers": [waiting("main", "CrashLoopBackOff", lastState=ended(1, OUT_OF_MEMORY), restartCount=1)]},
        Reason.MODEL_LOAD_FAILED,
        ["can't load the model", "CUDA out of memory", "parallelism.tensor", "logs p -c main --previous"],
    ),
    "sidecar that runs out of memory": (
        "decode",
        {"containers": [waiting("proxy", "CrashLoopBackOff", lastState=ended(1, OUT_OF_MEMORY), restartCount=1)]},
        Reason.CRASH_LOOP,
        ["container proxy of pod p failed", "CUDA out of memory"],
    ),
    "no node has room": (
        "decode",
        {"conditions": [NO_NODE]},
        Reason.UNSCHEDULABLE,
        ["too little nvidia.com/gpu is free. ", "3 Insufficient nvidia.com/gpu. Free or add"],
    ),
    "engine loading": (
        "decode",
        {"containers": [{"name": "main", "state": RUNNING, "started": False}]},
        Reason.STARTING,
        ["loads the model"],
    ),
    "engine that has just started": (
        "decode",
        {"containers": [{"name": "main", "state": RUNNING, "started": True}], "since": "2026-01-01T00:00:00Z"},
        Reason.STARTING,
        ["first readiness probe is awaited"],
    ),
    "engine that stopped answering": (
        "decode",
        {"containers": [{"name": "main", "state": RUNNING, "started": True}], "since": "2026-01-01T00:05:00Z"},
        Reason.PROBE_FAILED,
        ["readiness probe fails", "describe pod p"],
    ),
    "engine whose node has gone": (
        # The kubelet said last that all is well, and Kubernetes alone that the pod is not ready.
        "decode",
        {
            "containers": [{"name": "main", "state": RUNNING, "started": True}],
            "conditions": [{"type": "ContainersReady", "status": "True"}],
            "since": "2026-01-01T00:05:00Z",
        },
        Reason.NODE_LOST,
        ["the node of pod p doesn't answer", "get pod p -o wide"],
    ),
    "router whose node has gone": (
        "router",
        {
            "containers": [{"name": "main", "state": RUNNING, "started": True}],
            "conditions": [{"type": "ContainersReady", "status": "True"}],
        },
        Reason.NODE_LOST,
        ["the node of pod p doesn't answer"],
    ),
    "router without engines": (
        "router",
        {"containers": [{"name": "main", "state": RUNNING, "started": True}]},
        Reason.WAITING_FOR_ENGINES,
        ["waits for a ready engine of each role"],
    ),
    "volumes being mounted": (
        "decode",
        {"containers": [waiting("main", "ContainerCreating")]},
        Reason.PODS_PENDING,
        ["is being set up"],
    ),
    "init containers that are done": (
        "decode",
        {
            "init": [{"name": "connector", "ready": True, "state": ended(0), "lastState": ended(1, "once")}],
            "containers": [{"name": "main", "state": RUNNING, "started": False}],
        },
        Reason.STARTING,
        [],
    ),
}


def test_a_pod_that_waits_for_readiness_gates_says_so():
    waits = pod("decode", "r1", name="p", containers=[{"name": "main", "state": RUNNING, "started": True}])
    waits["status"]["conditions"] = [
        {"type": "ContainersReady", "status": "True"},
        {"type": "Ready", "status": "False", "reason": "ReadinessGatesNotReady", "message": "gate lb is missing"},
    ]
    problem = pod_problem(waits, "decode", "models")
    assert problem is not None
    assert problem.reason is Reason.PODS_PENDING
    assert "its readiness gates are not: gate lb is missing" in problem.message


@pytest.mark.parametrize("case", CASES)
def test_the_reason_is_found_and_said(case: str):
    component, parts, reason, words = CASES[case]
    problem = pod_problem(pod(component, "r1", name="p", **parts), component, "models")
    assert problem is not None
    assert problem.reason is reason
    for expected in ["pod p", *words]:
        assert expected in problem.message


def test_a_ready_pod_has_no_problem():
    assert pod_problem(pod("decode", "r1", ready=True), "decode", "models") is None


def test_the_two_texts_of_one_failed_pull_give_one_message():
    texts = [
        ("ErrImagePull", "manifest unknown"),
        ("ImagePullBackOff", 'Back-off pulling image "acme/engine:1": ErrImagePull: manifest unknown'),
    ]
    said = {
        pod_problem(pod("decode", "r1", name="p", containers=[waiting("main", *text)]), "decode", "models")
        for text in texts
    }
    assert len(said) == 1


def test_what_no_node_has_enough_of_is_said_with_how_much_the_pod_asks_for():
    said = (
        "0/5 nodes are available: 1 node(s) had untolerated taint(s), 2 Insufficient cpu, 4 Insufficient rdma/hca_a.1. "
        "preemption: 0/5 nodes are available: 4 No preemption victims found."
    )
    resources = {"limits": {"rdma/hca_a.1": "8"}, "requests": {"cpu": "500m", "rdma/hca_a.1": "8"}}
    template = {
        "initContainers": [{"name": "connector", "resources": {"requests": {"cpu": "10m"}}}],
        "containers": [{"name": "main", "resources": resources}, {"name": "sidecar"}],
    }
    unscheduled = pod("decode", "r1", name="p", conditions=[{**NO_NODE, "message": said}])
    problem = pod_problem(unscheduled, "decode", "models", template)
    assert problem is not None
    assert problem.reason is Reason.UNSCHEDULABLE
    assert "too little cpu is free, of which it asks for 10m in container connector and 500m in container main" in (
        problem.message
    )
    assert "too little rdma/hca_a.1 is free, of which it asks for 8 in container main. " in problem.message


def test_a_pod_that_no_node_may_take_for_another_cause_has_the_schedulers_words():
    said = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
    unscheduled = pod("decode", "r1", name="p", conditions=[{**NO_NODE, "message": said}])
    problem = pod_problem(unscheduled, "decode", "models")
    assert problem is not None
    assert "no node can take pod p: 0/1 nodes are available: 1 node(s) didn't match" in problem.message
    assert "too little" not in problem.message
