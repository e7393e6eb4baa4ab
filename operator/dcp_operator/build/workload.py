"""What the Deployments of all components have in common, and the revision that two roles' templates add up to."""

from typing import Any

from dcp_operator import names
from dcp_operator.build.engine_pod import engine_pod_template
from dcp_operator.build.objects import Context, Manifest
from dcp_operator.settings import Role

#: How long a Deployment may go without progress before Kubernetes says so, in seconds: engines load for long.
_PROGRESS_DEADLINE_S = 3600
#: What of a container decides what runs in it.
_STARTED_WITH = ("image", "command", "args", "env", "envFrom")


def deployment(
    context: Context,
    metadata: Manifest,
    *,
    component: str,
    revision: str,
    replicas: int,
    rolling_update: dict[str, Any],
    template: Manifest,
) -> Manifest:
    """Return a Deployment that runs one revision of a component."""
    about = template["metadata"]
    labelled = {**template, "metadata": {**about, "labels": {**about["labels"], names.LABEL_REVISION: revision}}}
    annotations = {names.ANNOTATION_OPERATOR_IMAGE: image_annotation(context)}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {**metadata, "annotations": annotations},
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": 1,
            "progressDeadlineSeconds": _PROGRESS_DEADLINE_S,
            "selector": {"matchLabels": names.selector(context.name, component, revision)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": rolling_update},
            "template": labelled,
        },
    }


def image_annotation(context: Context) -> str:
    """Return how a Deployment remembers the operator image of its revision: an upgrade must not replace its pods."""
    return f"{context.pull_policy} {context.operator_image}"


def revision_of(context: Context) -> str:
    """Return the pair revision: a hash of what prefill, decode and their connector have to agree on.

    Of each role that is what its engine is started with, the init container that brings the connector, and the volume
    that the model comes from. A change of it replaces both roles together. Whatever else the templates say (sidecars,
    resources, probes, placement, labels) changes the workload of one role in place, and replicas are outside of a
    template. Kept out on purpose are the operator image, so that an upgrade of the operator replaces no pod, and the
    ports on nodes, which follow from the revision.
    """
    fixed = Context(
        name=context.name,
        namespace=context.namespace,
        spec=context.spec,
        operator_image="",
        pull_policy="",
    )
    return names.digest({role.value: _agreed(engine_pod_template(fixed, role)) for role in Role})


def _agreed(template: Manifest) -> Manifest:
    """Return of a role's pod template what the other role depends on."""
    spec: Manifest = template["spec"]
    return {
        "main": _started(spec["containers"], names.CONTAINER_MAIN),
        "connector": _started(spec.get("initContainers", []), names.CONTAINER_CONNECTOR),
        "model": [volume for volume in spec.get("volumes", []) if volume["name"] == names.VOLUME_MODEL],
    }


def _started(containers: list[Manifest], name: str) -> Manifest:
    """Return what the container of a name is started with, empty where there is none."""
    none: Manifest = {}
    found = next((container for container in containers if container["name"] == name), none)
    return {key: found[key] for key in _STARTED_WITH if key in found}
