"""What the Deployments of all components have in common, and the revision that their templates add up to."""

import copy
from typing import Any

from dcp_operator import names
from dcp_operator.build.engine_pod import engine_pod_template
from dcp_operator.build.objects import Context, Manifest
from dcp_operator.build.router_pod import router_pod_template
from dcp_operator.settings import Role

#: How long a Deployment may go without progress before Kubernetes says so, in seconds: engines load for long.
_PROGRESS_DEADLINE_S = 3600


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
    labelled = copy.deepcopy(template)
    labelled["metadata"]["labels"][names.LABEL_REVISION] = revision
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
    """Return the revision: a hash of the pod templates of prefill, decode and router.

    Replicas are outside a template, so scaling never makes a new revision. Two things are kept out of the hash on
    purpose: the operator image, so that an upgrade of the operator replaces no pod, and the key's fingerprint, which
    replaces pods within the revision.
    """
    fixed = Context(
        name=context.name,
        namespace=context.namespace,
        spec=context.spec,
        operator_image="",
        pull_policy="",
    )
    templates = {role.value: engine_pod_template(fixed, role) for role in Role}
    templates[names.ROUTER] = router_pod_template(fixed, revision="")
    return names.digest(templates)
