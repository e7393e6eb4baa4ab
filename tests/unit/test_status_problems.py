"""Why pods are not ready, from what Kubernetes says about them: each reason, its words, and which comes first."""

import pytest

from dcp_operator.problems import last_words, pod_problem
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
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
(EngineCore pid=9) exiting
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
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
        ["exit code 1 after 3 restarts", "torch.OutOfMemoryError: CUDA out of memory", "logs p -c main --previous"],
    ),
    "engine running again after a crash": (
        "decode",
        {"containers": [{"name": "main", "state": RUNNING, "lastState": ended(1, TRACE), "restartCount": 1}]},
        Reason.CRASH_LOOP,
        ["after 1 restart:", "OutOfMemoryError"],
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
    "no node has room": ("decode", {"conditions": [NO_NODE]}, Reason.UNSCHEDULABLE, ["3 Insufficient nvidia.com/gpu."]),
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


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("", ""),
        ("\n \n", ""),
        ("only this", "only this"),
        ("ValueError: bad\nINFO: bye", "ValueError: bad"),
        ("a\nb", "b"),
        (TRACE, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
        ("RuntimeError: Engine core initialization failed.", "RuntimeError: Engine core initialization failed."),
    ],
)
def test_the_last_words_are_the_line_that_says_most(output: str, expected: str):
    assert last_words(output) == expected


def test_very_long_last_words_are_cut():
    assert len(last_words("ValueError: " + "x" * 5000)) == 400
