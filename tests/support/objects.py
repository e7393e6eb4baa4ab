"""Objects for tests of the operator: a small valid one, and the parts of pods that matter."""

import copy
from typing import Any

from dcp_operator import names
from dcp_operator.api.base import API_VERSION, KIND

Body = dict[str, Any]


def spec(**changes: Any) -> Body:
    """Return a valid spec: prefill TP 1, decode TP 2 with DCP 2, without a GPU; `changes` replace its fields."""
    geometry = {"attention": "gqa", "attentionHeads": 4, "kvHeads": 1, "layers": 4, "maxModelLen": 1024}
    result: Body = {
        "model": {"uri": "hf://acme/tiny", "geometry": geometry},
        "image": "acme/engine:1",
        "accelerator": {"resourceName": "cpu"},
        "kvConnector": {"protocol": "tcp"},
        "prefill": {"replicas": 1, "parallelism": {"tensor": 1}, "blockSize": 32},
        "decode": {"replicas": 1, "parallelism": {"tensor": 2, "decodeContext": 2}, "blockSize": 32},
    }
    return {**result, **copy.deepcopy(changes)}


def owner(name: str = "chat", namespace: str = "models", **changes: Any) -> Body:
    """Return an object as the API server stores it."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, "namespace": namespace, "uid": "owner-uid", "generation": 1, "resourceVersion": "1"},
        "spec": spec(**changes),
    }


def pod(
    component: str,
    revision: str,
    *,
    name: str = "",
    ready: bool = False,
    since: str = "2026-01-01T00:00:00Z",
    owner_name: str = "chat",
    conditions: list[Body] | None = None,
    init: list[Body] | None = None,
    containers: list[Body] | None = None,
    **metadata: Any,
) -> Body:
    """Return a pod as the operator keeps it."""
    said = [{"type": "Ready", "status": str(ready), "lastTransitionTime": since}, *(conditions or [])]
    return {
        "kind": "Pod",
        "metadata": {
            "name": name or f"{owner_name}-{component}-{revision}-abcde",
            "namespace": "models",
            "uid": f"pod-{name or component}",
            "resourceVersion": "5",
            "labels": {names.LABEL_NAME: owner_name, names.LABEL_ROLE: component, names.LABEL_REVISION: revision},
            **metadata,
        },
        "status": {
            "phase": "Running" if ready else "Pending",
            "conditions": said,
            "initContainerStatuses": init or [],
            "containerStatuses": containers or [],
        },
    }
