"""Objects for tests of admission: one that is right in every way, and changes of it."""

import copy
from typing import Any

from dcp_operator.api.load import load
from dcp_operator.api.objects import DCPDisaggDeployment
from dcp_operator.rules import Report, check_body

#: Allowed, and without a warning.
SPECIMEN: dict[str, Any] = {
    "apiVersion": "dcpdisagg.io/v1alpha1",
    "kind": "DCPDisaggDeployment",
    "metadata": {"name": "chat", "namespace": "models"},
    "spec": {
        "model": {
            "uri": "hf://example/model",
            "geometry": {"attention": "gqa", "attentionHeads": 32, "kvHeads": 4, "layers": 32, "maxModelLen": 32768},
        },
        "image": "vllm/vllm-openai:v0.33.0",
        "kvConnector": {"protocol": "tcp"},
        "prefill": {"replicas": 2, "parallelism": {"tensor": 4}},
        "decode": {"replicas": 1, "parallelism": {"tensor": 8, "decodeContext": 2}},
    },
}

MLA = {"spec": {"model": {"geometry": {"attention": "mla", "attentionHeads": 16, "kvHeads": 1, "layers": 27}}}}


def specimen(*changes: dict[str, Any]) -> dict[str, Any]:
    """Return the specimen with changes laid over it: maps are merged, everything else is replaced."""
    body = copy.deepcopy(SPECIMEN)
    for change in changes:
        body = merged(body, change)
    return body


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else copy.deepcopy(value)
    return result


def role(name: str, **fields: Any) -> dict[str, Any]:
    """Return a change of one role."""
    return {"spec": {name: fields}}


def main_container(name: str, **fields: Any) -> dict[str, Any]:
    """Return a change that gives a role's template a container main with these fields."""
    return role(name, template={"spec": {"containers": [{"name": "main", **fields}]}})


def sizes(name: str, **parallelism: int) -> dict[str, Any]:
    """Return a change of one role's parallel sizes."""
    return role(name, parallelism=parallelism)


def report(*changes: dict[str, Any]) -> Report:
    """Check the changed specimen."""
    return check_body(specimen(*changes))


def violations(*changes: dict[str, Any]) -> list[str]:
    """Return the complete messages of everything that refuses the changed specimen."""
    return [str(finding) for finding in report(*changes).violations]


def warnings(*changes: dict[str, Any]) -> list[str]:
    """Return the complete messages of all warnings about the changed specimen."""
    return [str(finding) for finding in report(*changes).warnings]


def loaded(*changes: dict[str, Any]) -> DCPDisaggDeployment:
    """Return the changed specimen as an object; it must have a valid schema."""
    result = load(specimen(*changes))
    assert result.obj is not None, result.findings
    return result.obj
