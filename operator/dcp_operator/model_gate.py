"""Whether the model of a revision is where its engines look for it, and what to say while it is not: pure.

Engines are made once the Job that pulls the model has succeeded. Engines that exist stay, whatever becomes of the Job:
they have the model.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from dcp_operator import names
from dcp_operator.kinds import JOB, Ref, ref_of
from dcp_operator.observed import Body, Child, Observed, entries, section
from dcp_operator.problems import last_words, pod_problem
from dcp_operator.reasons import Problem, Reason
from dcp_operator.settings import Role

_JOB_NAME: Final = "batch.kubernetes.io/job-name"


def model_gate(manifests: Iterable[dict[str, Any]], revision: str, observed: Observed) -> Problem | None:
    """Return what engines of a revision wait for, None if nothing keeps them from being made."""
    wanted = next((ref_of(manifest) for manifest in manifests if manifest["kind"] == JOB.kind), None)
    if wanted is None or any(observed.workload(role, revision) is not None for role in Role):
        return None
    job = observed.children.get(wanted)
    if job is None or not job.belongs_to(observed.uid) or job.is_deleting:
        return Problem(Reason.MODEL_PULLING, f"{wanted}, which pulls the model into its claim, is being made")
    if _has_condition(job, "Complete"):
        return None
    pods = _pods_of(observed, wanted)
    failed = [pod for pod in pods if section(pod, "status").get("phase") == "Failed"]
    said = _last_words(failed)
    again = f"kubectl -n {observed.key.namespace} delete job {wanted.name}"
    if _has_condition(job, "Failed"):
        words = said or _message(job, "Failed")
        return Problem(
            Reason.MODEL_PULL_FAILED,
            f"{wanted} could not pull the model and has given up: {words}. Correct the cause, and have it tried again: "
            f"{again}",
        )
    live = [pod for pod in pods if section(pod, "status").get("phase") in ("Pending", "Running")]
    problem = next((found for pod in live if (found := _pending_problem(pod, observed)) is not None), None)
    if problem is not None:
        return Problem(problem.reason, f"the model is not pulled yet: {problem.message}")
    if failed:
        tries = f"{len(failed)} {'try' if len(failed) == 1 else 'tries'} of {wanted} to pull the model failed"
        return Problem(Reason.MODEL_PULL_FAILED, f"{tries}: {said or 'it said nothing'}. It is tried again by itself")
    what = "pulls the model into its claim" if live else "is about to pull the model into its claim"
    return Problem(Reason.MODEL_PULLING, f"{wanted} {what}; engines are made when it is there")


def _pending_problem(pod: Body, observed: Observed) -> Problem | None:
    """Return what keeps a pod of the Job from running, None where it runs or only takes its time."""
    if section(pod, "status").get("phase") != "Pending":
        return None
    problem = pod_problem(pod, names.MODEL, observed.key.namespace)
    return problem if problem is not None and not problem.reason.is_progress else None


def _pods_of(observed: Observed, job: Ref) -> list[Body]:
    """Return the pods of a Job, the newest last."""
    found = [pod for pod in observed.pods if section(pod, "metadata", "labels").get(_JOB_NAME) == job.name]
    return sorted(found, key=lambda pod: (pod["metadata"].get("creationTimestamp", ""), pod["metadata"]["name"]))


def _last_words(failed: Sequence[Body]) -> str:
    """Return the last line of what the newest failed pod said, empty where none said anything."""
    for pod in reversed(failed):
        for entry in entries(pod, "status", "containerStatuses"):
            words = last_words(section(entry, "state", "terminated").get("message") or "")
            if words:
                return words.removeprefix("model pull: ")
    return ""


def _has_condition(job: Child, kind: str) -> bool:
    return any(
        condition.get("type") == kind and condition.get("status") == "True"
        for condition in entries(job.body, "status", "conditions")
    )


def _message(job: Child, kind: str) -> str:
    """Return what Kubernetes says about a Job's condition."""
    found = (condition for condition in entries(job.body, "status", "conditions") if condition.get("type") == kind)
    return next((condition.get("message") or condition.get("reason") or "" for condition in found), "")
