"""The Job that pulls a model of a hub into a claim, once for all engines (docs/adr/0014-host-ports-and-model-job.md).

Its pod is what a pod of prefill would be, without accelerators, sidecars and probes: the same image, which has the
hub's client, and of prefill's template what decides where it runs and how it reaches the hub.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any, Final, cast

from dcp_operator import names
from dcp_operator.build.engine_pod import restricted
from dcp_operator.build.merge import Manifest, merge, named_list, part, readable
from dcp_operator.build.model_source import cache_folder, claim_volume, token_env
from dcp_operator.build.objects import Context, metadata
from dcp_operator.settings import Role, role_spec

#: Pods that are tried before the Job is given up; the pauses between them double, from 10 s on.
_BACKOFF_LIMIT: Final = 5
#: Fields of prefill's pod that are about its devices, its life as a server or its neighbours.
_NOT_OF_POD: Final = frozenset(
    {
        "activeDeadlineSeconds",
        "affinity",
        "containers",
        "ephemeralContainers",
        "hostIPC",
        "hostNetwork",
        "hostPID",
        "initContainers",
        "readinessGates",
        "resourceClaims",
        "restartPolicy",
        "terminationGracePeriodSeconds",
        "topologySpreadConstraints",
    }
)
_OF_MAIN: Final = ("env", "envFrom", "imagePullPolicy", "securityContext", "volumeDevices", "volumeMounts")


def build_model_job(context: Context) -> Manifest | None:
    """Return the Job, or None where the model is not cached.

    Its name changes with what is pulled, where to, and how its pods run; not with the program's text, or else each
    release of the operator could end a pull that is under way, and begin one for every object that has its model.

    Raises TemplateError for a template of prefill that can't be merged.
    """
    if context.spec.model.cache is None:
        return None
    template = _pod_template(context, program())
    digest = names.digest(_pod_template(context, ""))
    job = {
        "backoffLimit": _BACKOFF_LIMIT,
        "completions": 1,
        "parallelism": 1,
        "template": template,
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(context, names.model_job(context.name, digest), names.MODEL),
        "spec": job,
    }


def _pod_template(context: Context, text: str) -> Manifest:
    path = f"spec.{Role.PREFILL}.template"
    user = role_spec(context.spec, Role.PREFILL).template
    result = merge(merge(_defaults(), _of_prefill(user, path), path), _owned(context, _python(user, path), text), path)
    containers = result["spec"]["containers"]
    containers[0] = readable(containers[0])
    return result


def _defaults() -> Manifest:
    main: Manifest = {
        "name": names.CONTAINER_MAIN,
        "imagePullPolicy": "IfNotPresent",
        "env": [
            {"name": "HF_HUB_DISABLE_PROGRESS_BARS", "value": "1"},
            # The client keeps a little beside the model, and a user without a home has no other place for it.
            {"name": "HF_HOME", "value": "/tmp/huggingface"},  # noqa: S108 - a path in the container
        ],
        "securityContext": restricted(),
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
    }
    return {"metadata": {}, "spec": {"automountServiceAccountToken": False, "containers": [main]}}


def _of_prefill(user: Mapping[str, Any], path: str) -> Manifest:
    """Return the part of prefill's template that the Job shares."""
    spec = part(user, "spec", path)
    mains = [each for each in named_list(spec, "containers", f"{path}.spec") if each["name"] == names.CONTAINER_MAIN]
    kept = [{"name": names.CONTAINER_MAIN, **{key: each[key] for key in _OF_MAIN if key in each}} for each in mains]
    pod = {key: value for key, value in spec.items() if key not in _NOT_OF_POD}
    return {"spec": {**pod, "containers": kept}}


def _python(user: Mapping[str, Any], path: str) -> str:
    """Return the engine's interpreter, if the template states one: only that one is sure to find the hub's client."""
    for container in named_list(part(user, "spec", path), "containers", f"{path}.spec"):
        command = container.get("command")
        if container["name"] == names.CONTAINER_MAIN and isinstance(command, list) and command:
            first = str(cast("list[object]", command)[0])
            if PurePosixPath(first).name.startswith("python"):
                return first
    return "python3"


def _owned(context: Context, python: str, text: str) -> Manifest:
    model = context.spec.model
    cache_ = model.cache
    assert cache_ is not None, "called for a model with a cache only"
    stated = {
        "DCP_MODEL_REPOSITORY": model.uri.partition("://")[2],
        "DCP_MODEL_REVISION": model.revision,
        "DCP_MODEL_FOLDER": f"{names.PATH_MODELS}/{cache_folder(model)}",
        "DCP_MODEL_JOB": context.name,
    }
    main: Manifest = {
        "name": names.CONTAINER_MAIN,
        "image": role_spec(context.spec, Role.PREFILL).image or context.spec.image,
        "command": [python, "-c", text],
        "env": [
            *({"name": name, "value": value} for name, value in stated.items() if value is not None),
            # A template may keep engines from asking the hub.
            {"name": "HF_HUB_OFFLINE", "value": "0"},
            *token_env(model),
        ],
        # The last lines of what the program says become the pod's message.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": names.VOLUME_MODEL, "mountPath": names.PATH_MODELS}],
    }
    return {
        "metadata": {"labels": names.labels(context.name, names.MODEL)},
        "spec": {
            # Each try is a pod of its own, so that what a failed one has said can be read.
            "restartPolicy": "Never",
            "containers": [main],
            "volumes": [claim_volume(cache_.claim_name, read_only=False)],
        },
    }


@cache
def program() -> str:
    """Return the program that pulls a model."""
    return files("dcp_operator").joinpath("model_pull.py").read_text(encoding="utf-8")
