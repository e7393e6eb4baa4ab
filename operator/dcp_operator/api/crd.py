"""The CustomResourceDefinitions, generated from the models: they are the only place where the API is written down.

A JSON schema of pydantic becomes a structural schema of Kubernetes: references are inlined, optional values lose their
null, a value of int or string is marked so, and free-form maps keep what they hold. Defaults of the models become
defaults of the CRD, so that an object reads back complete.
"""

from typing import Any

from pydantic import BaseModel

from dcp_operator.api.base import (
    GROUP,
    KIND,
    PLURAL,
    SCALER_KIND,
    SCALER_PLURAL,
    SCALER_SHORT_NAME,
    SCALER_SINGULAR,
    SHORT_NAME,
    SINGULAR,
    VERSION,
)
from dcp_operator.api.cel import cel_rules
from dcp_operator.api.scaler import ScalerSpec, ScalerStatus
from dcp_operator.api.spec import Spec
from dcp_operator.api.status import Status

#: Keywords that mean the same in both dialects.
_KEPT = ("type", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "maxItems", "format")

_COLUMNS: list[dict[str, Any]] = [
    {"name": "Model", "type": "string", "jsonPath": ".spec.model.uri"},
    {"name": "Ready", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Ready")].status'},
    {
        "name": "Prefill",
        "type": "integer",
        "jsonPath": ".status.prefill.readyReplicas",
        "description": "Prefill engines that are ready.",
    },
    {
        "name": "Decode",
        "type": "integer",
        "jsonPath": ".status.decode.readyReplicas",
        "description": "Decode engines that are ready.",
    },
    {
        "name": "TP/DCP",
        "type": "string",
        "jsonPath": ".status.parallelism",
        "description": "Tensor and decode context size, prefill -> decode.",
    },
    {"name": "Reason", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Ready")].reason'},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
]

_SCALER_COLUMNS: list[dict[str, Any]] = [
    {"name": "Asked", "type": "integer", "jsonPath": ".spec.replicas", "description": "Engines that are asked for."},
    {"name": "Engines", "type": "integer", "jsonPath": ".status.replicas", "description": "Engines that exist."},
    {"name": "Bounded", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Bounded")].reason'},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
]

#: Where autoscalers and `kubectl scale` find the counts.
_SCALE: dict[str, Any] = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".status.selector",
}


def crds() -> list[dict[str, Any]]:
    """Return all definitions, the one that users write objects of first."""
    return [crd(), scaler_crd()]


def crd() -> dict[str, Any]:
    """Return the definition of DCPDisaggDeployment. Equal calls give equal values, key order included."""
    spec = structural_schema(Spec, with_defaults=True)
    spec["x-kubernetes-validations"] = cel_rules()
    return _definition(
        {
            "kind": KIND,
            "listKind": f"{KIND}List",
            "plural": PLURAL,
            "singular": SINGULAR,
            "shortNames": [SHORT_NAME],
            "categories": ["all"],
        },
        subresources={"status": {}},
        columns=_COLUMNS,
        description="Serves one large language model with prefill and decode on separate engines, the decode side's "
        "KV cache sharded over ranks by decode context parallelism.",
        spec=spec,
        # The operator writes status field by field: nothing is filled in behind its back.
        status=structural_schema(Status, with_defaults=False),
    )


def scaler_crd() -> dict[str, Any]:
    """Return the definition of DCPDisaggRoleScaler, with the scale subresource that autoscalers act on."""
    return _definition(
        {
            "kind": SCALER_KIND,
            "listKind": f"{SCALER_KIND}List",
            "plural": SCALER_PLURAL,
            "singular": SCALER_SINGULAR,
            "shortNames": [SCALER_SHORT_NAME],
        },
        subresources={"status": {}, "scale": _SCALE},
        columns=_SCALER_COLUMNS,
        description="Holds how many engines of one role of a DCPDisaggDeployment are asked for. The operator makes it "
        "while the role states scaling; point a HorizontalPodAutoscaler or a ScaledObject at it.",
        spec=structural_schema(ScalerSpec, with_defaults=True),
        status=structural_schema(ScalerStatus, with_defaults=False),
    )


def _definition(
    names: dict[str, Any],
    *,
    subresources: dict[str, Any],
    columns: list[dict[str, Any]],
    description: str,
    spec: dict[str, Any],
    status: dict[str, Any],
) -> dict[str, Any]:
    schema = {
        "type": "object",
        "description": description,
        "required": ["spec"],
        "properties": {
            "apiVersion": {
                "type": "string",
                "description": f"Version of this API: {GROUP}/{VERSION}.",
            },
            "kind": {"type": "string", "description": f"{names['kind']}."},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{names['plural']}.{GROUP}",
            "labels": {"app.kubernetes.io/name": "dcp-disagg", "app.kubernetes.io/component": "crd"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": names,
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": subresources,
                    "additionalPrinterColumns": columns,
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


def structural_schema(model: type[BaseModel], *, with_defaults: bool) -> dict[str, Any]:
    """Return the structural schema of a model."""
    schema = model.model_json_schema(by_alias=True)
    return _Translator(schema.get("$defs", {}), with_defaults=with_defaults).translate(schema)


class _Translator:
    def __init__(self, definitions: dict[str, Any], *, with_defaults: bool) -> None:
        self._definitions = definitions
        self._with_defaults = with_defaults

    def translate(self, source: dict[str, Any]) -> dict[str, Any]:
        """Translate one schema node; a description beside a reference wins over that of the referenced model."""
        node = self._inline(source)
        result: dict[str, Any] = {}
        if "description" in node:
            result["description"] = node["description"]
        result.update(self._branches(node) if "anyOf" in node else self._plain(node))
        if "const" in node:
            result["enum"] = [node["const"]]
        result.update({key: value for key, value in node.items() if key.startswith("x-kubernetes-")})
        if self._with_defaults and node.get("default") is not None:
            result["default"] = node["default"]
        return result

    def _inline(self, node: dict[str, Any]) -> dict[str, Any]:
        """Replace a reference by what it names, and an optional value by the value."""
        outer = {key: value for key, value in node.items() if key not in ("$ref", "anyOf")}
        if "anyOf" in node:
            real = [branch for branch in node["anyOf"] if branch.get("type") != "null"]
            if len(real) > 1:
                return {**outer, "anyOf": real}
            return self._inline({**real[0], **outer})
        if "$ref" in node:
            target = self._definitions[node["$ref"].removeprefix("#/$defs/")]
            return self._inline({**target, **outer})
        return node

    def _branches(self, node: dict[str, Any]) -> dict[str, Any]:
        """Translate a value that is a whole number or a string; the only union that the API uses."""
        number, text = sorted(node["anyOf"], key=lambda branch: str(branch["type"]))
        if (number["type"], text["type"]) != ("integer", "string"):
            raise TypeError(f"a structural schema has no union of {number['type']} and {text['type']}")
        return {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            **{key: number[key] for key in ("minimum", "maximum") if key in number},
            "pattern": text["pattern"],
            "maxLength": 8,
        }

    def _plain(self, node: dict[str, Any]) -> dict[str, Any]:
        result = {key: node[key] for key in _KEPT if key in node}
        if node.get("type") == "array":
            result["items"] = self.translate(node["items"])
            result["x-kubernetes-list-type"] = "atomic"
        if node.get("type") == "object":
            result.update(self._properties(node))
        return result

    def _properties(self, node: dict[str, Any]) -> dict[str, Any]:
        if "properties" not in node:
            return {"x-kubernetes-preserve-unknown-fields": True}
        properties = {name: self.translate(field) for name, field in node["properties"].items()}
        required = [name for name in node.get("required", []) if name in properties]
        result: dict[str, Any] = {"properties": properties}
        if required:
            result["required"] = required
        if self._with_defaults:
            for name, field in properties.items():
                # An absent map of defaults must be filled in too, or its own defaults never are. One without any stays
                # absent.
                has_defaults = any("default" in inner for inner in field.get("properties", {}).values())
                if name not in required and has_defaults and "required" not in field:
                    field["default"] = {}
        return result
