"""What engines wait for while their model is pulled, and what is said of a Job that fails."""

import copy

import pytest

from dcp_operator import names
from dcp_operator.kinds import ref_of
from dcp_operator.model_gate import model_gate
from dcp_operator.observed import Child, Observed
from dcp_operator.plan import Apply, Delete, make_plan
from dcp_operator.reasons import Reason
from dcp_operator.status import make_status
from dcp_operator.target import Operator, Target, resolve_target
from tests.support.objects import owner, spec
from tests.support.simulated_api import SimulatedApi, observe

OPERATOR = Operator("acme/operator:1")
MODEL = {**spec()["model"], "cache": {"claimName": "models"}}


def api_with(**changes) -> SimulatedApi:
    api = SimulatedApi()
    api.put(owner(**{"model": MODEL, **changes}))
    return api


def target_of(api: SimulatedApi) -> Target:
    target = resolve_target(observe(api), OPERATOR, "ZnJlc2g=")
    assert target.revision is not None, target.violations
    return target


def job_of(target: Target) -> dict:
    (found,) = [manifest for manifest in target.manifests if manifest["kind"] == "Job"]
    return found


def put_job(api: SimulatedApi, *conditions: tuple[str, str]) -> dict:
    """Have the Job exist, with conditions that are True, each with its message."""
    said = [{"type": kind, "status": "True", "message": message} for kind, message in conditions]
    return api.put({**copy.deepcopy(job_of(target_of(api))), "status": {"conditions": said}})


def put_pod(api: SimulatedApi, job: dict, number: int, phase: str, message: str = "", **status) -> None:
    state = {"terminated": {"exitCode": 1, "message": message}} if phase == "Failed" else {"waiting": {}}
    labels = {**names.labels("chat", names.MODEL), "batch.kubernetes.io/job-name": job["metadata"]["name"]}
    api.put(
        {
            "kind": "Pod",
            "metadata": {
                "name": f"pull-{number}",
                "namespace": "models",
                "labels": labels,
                "ownerReferences": [{"uid": job["metadata"]["uid"]}],
            },
            "status": {"phase": phase, "containerStatuses": [{"name": "main", "state": state}], **status},
        }
    )


def gate_of(api: SimulatedApi) -> tuple[Reason, str] | None:
    gate = target_of(api).gate
    return None if gate is None else (gate.reason, gate.message)


def workloads(target: Target) -> list[str]:
    return [manifest["metadata"]["name"] for manifest in target.manifests if manifest["kind"] == "Deployment"]


def test_without_a_cache_nothing_is_waited_for():
    api = SimulatedApi()
    api.put(owner())
    target = target_of(api)
    assert target.gate is None
    assert len(workloads(target)) == 3


def test_no_workload_is_made_before_the_model_is_there_and_all_are_made_then():
    api = api_with()
    assert workloads(target_of(api)) == []
    assert job_of(target_of(api))
    put_job(api)
    assert workloads(target_of(api)) == []
    put_job(api, ("Complete", ""))
    assert gate_of(api) is None
    assert len(workloads(target_of(api))) == 3


@pytest.mark.parametrize("conditions", [[], [("Failed", "x")]])
def test_engines_that_exist_stay_whatever_becomes_of_the_job(conditions: list):
    api = api_with()
    put_job(api, ("Complete", ""))
    for manifest in target_of(api).manifests:
        if manifest["kind"] == "Deployment":
            api.put(copy.deepcopy(manifest))
    put_job(api, *conditions)
    assert gate_of(api) is None
    assert len(workloads(target_of(api))) == 3


def test_a_job_of_somebody_else_opens_nothing():
    api = api_with()
    job = put_job(api, ("Complete", ""))
    job["metadata"]["ownerReferences"][0]["uid"] = "another"
    api.put(job)
    assert gate_of(api) is not None


def test_what_is_said_while_the_job_is_made_waits_and_pulls():
    api = api_with()
    name = job_of(target_of(api))["metadata"]["name"]
    assert gate_of(api) == (
        Reason.MODEL_PULLING,
        f"Job {name}, which pulls the model into its claim, is being made",
    )
    job = put_job(api)
    assert gate_of(api) == (
        Reason.MODEL_PULLING,
        f"Job {name} is about to pull the model into its claim; engines are made when it is there",
    )
    put_pod(api, job, 1, "Running")
    assert gate_of(api) == (
        Reason.MODEL_PULLING,
        f"Job {name} pulls the model into its claim; engines are made when it is there",
    )


def test_a_try_that_failed_says_its_last_line_and_that_another_one_follows():
    api = api_with()
    job = put_job(api)
    name = job["metadata"]["name"]
    put_pod(api, job, 1, "Failed", "Traceback\nmodel pull: acme/tiny can't be pulled: OSError: an old one\n")
    put_pod(api, job, 2, "Failed", "warning\nmodel pull: acme/tiny can't be pulled: OSError: no space left\n")
    assert gate_of(api) == (
        Reason.MODEL_PULL_FAILED,
        (
            f"2 tries of Job {name} to pull the model failed: acme/tiny can't be pulled: OSError: no space left. It is "
            "tried again by itself"
        ),
    )


def test_a_job_that_has_given_up_says_why_and_how_to_have_it_tried_again():
    api = api_with()
    job = put_job(api, ("Failed", "Job has reached the specified backoff limit"))
    name = job["metadata"]["name"]
    end = f"Correct the cause, and have it tried again: kubectl -n models delete job {name}"
    assert gate_of(api) == (
        Reason.MODEL_PULL_FAILED,
        f"Job {name} could not pull the model and has given up: Job has reached the specified backoff limit. {end}",
    )
    put_pod(api, job, 1, "Failed", "model pull: acme/tiny can't be pulled: OSError: disk full")
    assert gate_of(api) == (
        Reason.MODEL_PULL_FAILED,
        f"Job {name} could not pull the model and has given up: acme/tiny can't be pulled: OSError: disk full. {end}",
    )


def test_a_pod_of_the_job_that_finds_no_node_is_said_with_the_schedulers_words():
    api = api_with()
    job = put_job(api)
    unbound = {
        "type": "PodScheduled",
        "status": "False",
        "message": "pod has unbound immediate PersistentVolumeClaims.",
    }
    put_pod(api, job, 1, "Pending", conditions=[unbound])
    reason, message = gate_of(api) or (None, "")
    assert reason is Reason.UNSCHEDULABLE
    assert message.startswith("the model is not pulled yet: no node can take pod pull-1: pod has unbound immediate")


def test_the_conditions_say_what_is_waited_for():
    api = api_with()
    job = put_job(api)
    observed, target = observe(api), target_of(api)

    def said(kind: str) -> tuple[str, str]:
        status = make_status(observed, target, (), "2026-01-01T00:00:00Z")
        (found,) = [each for each in status["conditions"] if each["type"] == kind]
        return found["status"], found["reason"]

    assert said("Ready") == ("False", "ModelPulling")
    assert said("Progressing")[0] == "True"
    put_pod(api, job, 1, "Failed", "model pull: no")
    observed, target = observe(api), target_of(api)
    assert said("Ready") == ("False", "ModelPullFailed")
    assert said("Progressing") == ("False", "ModelPullFailed")


def test_what_runs_is_left_alone_while_the_next_model_is_pulled():
    strategy = {"maxSurge": 0, "maxUnavailable": 1}
    api = SimulatedApi()
    api.put(owner(rolloutStrategy=strategy))
    for manifest in target_of(api).manifests:
        api.put(copy.deepcopy(manifest))
    api.run_deployments()
    before = target_of(api).revision
    api.put({**copy.deepcopy(api.owner()), "spec": spec(model=MODEL, rolloutStrategy=strategy)})
    put_job(api)
    target = target_of(api)
    assert target.revision != before
    plan = make_plan(target, observe(api))
    assert {action.ref.kind for action in plan.actions} & {"Deployment"} == set()
    assert target.gate is not None
    assert target.rollout is not None
    assert target.rollout.waits_for == target.gate.message
    put_job(api, ("Complete", ""))
    plan = make_plan(target_of(api), observe(api))
    assert {type(action) for action in plan.actions if action.ref.kind == "Deployment"} == {Apply, Delete}


def test_a_gate_is_a_question_of_what_is_observed_alone():
    api = api_with()
    manifests = target_of(api).manifests
    body = {**job_of(target_of(api)), "status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    child = Child({**body, "metadata": {**body["metadata"], "uid": "j"}})
    observed = Observed(body=api.owner(), children={ref_of(body): child})
    assert model_gate(manifests, "abcd0123", observed) is None
    assert model_gate(manifests, "abcd0123", Observed(body=api.owner())) is not None
