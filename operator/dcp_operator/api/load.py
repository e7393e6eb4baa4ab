"""From a parsed document to the typed object, or to findings in the words of a user.

The same checks as the CRD's schema, for callers that have no API server in front of them (`dcpctl`), and for objects
that were stored under an older schema. Messages name the field as it is written in YAML and never mention Python.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast, get_args

from pydantic import BaseModel, ValidationError

from dcp_operator.api.base import API_VERSION, GROUP, KIND
from dcp_operator.api.findings import SCHEMA_RULE, Finding, kind_of, show
from dcp_operator.api.objects import DCPDisaggDeployment
from dcp_operator.api.spec import INT_OR_PERCENT_PATTERN, MAX_REPLICAS, RATIO_PATTERN, URI_PATTERN, Spec

#: A document of garbage would otherwise give a list that nobody reads, and take its time.
_MOST_FINDINGS = 100
#: Comparing texts takes time with the product of their lengths; nothing longer resembles a field.
_LONGEST_NAME = 40
#: More fields than a sentence lists.
_LISTED_FIELDS = 12
#: Fields whose content is not ours: nulls inside them are kept, as the API server keeps them.
_FREE_FORM = frozenset({"template", "extraConfig"})

#: What a pattern asks for, in words.
_PATTERN_WORDS = {
    URI_PATTERN: "must be hf://REPOSITORY, pvc://CLAIM/PATH or oci://IMAGE, without spaces",
    INT_OR_PERCENT_PATTERN: "must be a percentage from 0% to 100%",
    RATIO_PATTERN: "must be PREFILL:DECODE in whole numbers from 1, such as 1:4",
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """The outcome of `load`: an object, or the findings that say why there is none. Never both, never neither."""

    obj: DCPDisaggDeployment | None
    findings: tuple[Finding, ...]


def is_ours(body: object) -> bool:
    """Whether a document is meant to be a DCPDisaggDeployment: by its kind, or, with the kind misspelt, by its
    group."""
    if not isinstance(body, dict):
        return False
    document = cast("dict[Any, Any]", body)
    group = str(document.get("apiVersion", "")).partition("/")[0]
    return document.get("kind") == KIND or group == GROUP


def load(body: Mapping[str, Any]) -> Loaded:
    """Read one document. Findings have the rule id `schema`; nothing is raised, whatever the document holds."""
    findings = tuple(_header_findings(body))
    if findings:
        return Loaded(None, findings)
    document = {
        "apiVersion": body["apiVersion"],
        "kind": body["kind"],
        "metadata": _without_nulls(body.get("metadata") or {}),
        "spec": _without_nulls(body.get("spec")),
    }
    try:
        # The wire knows camelCase only; snake_case names are for Python callers.
        obj = DCPDisaggDeployment.model_validate(document, by_alias=True, by_name=False)
    except ValidationError as error:
        return Loaded(None, _translate(error, document))
    return Loaded(obj, ())


def load_spec(body: Mapping[str, Any]) -> Spec | None:
    """Return the spec of a document that is known to be valid, or None if it is not."""
    loaded = load(body)
    return loaded.obj.spec if loaded.obj else None


def _header_findings(body: Mapping[str, Any]) -> Iterator[Finding]:
    if body.get("apiVersion") != API_VERSION:
        yield _finding("apiVersion", f"found {show(body.get('apiVersion'))}, must be {API_VERSION}")
    if body.get("kind") != KIND:
        yield _finding("kind", f"found {show(body.get('kind'))}, must be {KIND}")
    if not isinstance(body.get("metadata") or {}, dict):
        yield _finding("metadata", f"found {kind_of(body['metadata'])}, must be a map")
    if body.get("spec") is None:
        yield _finding("spec", "is required: it says which model to run and how")


def _without_nulls(value: Any) -> Any:
    """Drop keys whose value is null, as the API server does for fields that are not nullable."""
    if isinstance(value, dict):
        fields = cast("dict[Any, Any]", value)
        return {
            key: item if key in _FREE_FORM else _without_nulls(item) for key, item in fields.items() if item is not None
        }
    return value


def _translate(error: ValidationError, document: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Return one finding per field, in the order in which the fields are declared."""
    findings: dict[str, Finding] = {}
    for detail in error.errors(include_url=False, include_context=True)[:_MOST_FINDINGS]:
        location = _real_location(detail["loc"], document)
        path = json_path(location)
        if path not in findings:
            message = _message(detail["type"], detail["input"], detail.get("ctx") or {}, location)
            findings[path] = _finding(path, message)
    return tuple(findings.values())


def _real_location(location: Sequence[int | str], document: Mapping[str, Any]) -> tuple[int | str, ...]:
    """Cut what pydantic adds behind a field: the branch of a union, or the marker of a map's key."""
    current: Any = document
    for position, step in enumerate(location):
        if isinstance(current, dict):
            current = cast("dict[Any, Any]", current).get(step)
        elif isinstance(current, list) and isinstance(step, int):
            items = cast("list[Any]", current)
            current = items[step] if step < len(items) else None
        else:
            return tuple(location[:position])
    return tuple(location)


def json_path(location: Sequence[int | str]) -> str:
    """Return a path such as `spec.decode.extraArgs[2]`."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif path:
            path += f".{step}"
        else:
            path = step
    return path


def _message(kind: str, found: Any, context: Mapping[str, Any], location: Sequence[int | str]) -> str:
    """Return what one schema error means. `kind` and `context` are pydantic's; the text is ours."""
    shown = show(found)
    if location and location[-1] in ("maxSurge", "maxUnavailable"):
        return f"found {shown}, must be a whole number from 0 to {MAX_REPLICAS} or a percentage such as 25%"
    match kind:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return _unknown_field(location)
        case "int_type" | "int_parsing" | "int_from_float":
            return f"found {kind_of(found)} ({shown}), must be a whole number"
        case "string_type":
            return f"found {kind_of(found)} ({shown}), must be a string"
        case "bool_type" | "bool_parsing":
            return f"found {kind_of(found)} ({shown}), must be true or false"
        case "list_type" | "tuple_type":
            return f"found {kind_of(found)} ({shown}), must be a list"
        case "dict_type" | "model_type" | "model_attributes_type":
            return f"found {kind_of(found)} ({shown}), must be a map"
        case "literal_error":
            return f"found {shown}, must be one of {', '.join(_choices(context))}"
        case "greater_than_equal":
            return f"found {shown}, must be at least {context['ge']}"
        case "less_than_equal":
            return f"found {shown}, must be at most {context['le']}"
        case "string_too_short":
            return "is empty"
        case "string_too_long":
            return f"has {len(found)} characters, at most {context['max_length']} are allowed"
        case "too_long":
            return f"has {len(found)} items, at most {context['max_length']} are allowed"
        case "string_pattern_mismatch":
            pattern = str(context["pattern"])
            return f"found {shown}, {_PATTERN_WORDS.get(pattern, f'must match {pattern}')}"
        case _:
            return f"found {shown}, which is not a value of this field"


def _choices(context: Mapping[str, Any]) -> list[str]:
    return str(context["expected"]).replace(" or ", ", ").replace("'", "").split(", ")


def _unknown_field(location: Sequence[int | str]) -> str:
    parent = json_path(location[:-1])
    known = _field_names(location[:-1])
    near = difflib.get_close_matches(str(location[-1])[:_LONGEST_NAME], known, n=1)
    listed = f"its fields are {', '.join(known)}"
    if len(known) > _LISTED_FIELDS:
        listed = f"kubectl explain dcpd{f'.{parent}' if parent else ''} lists its fields"
    hint = f"did you mean {near[0]}?" if near else listed
    return f"is not a field of {parent}; {hint}"


def _field_names(location: Sequence[int | str]) -> list[str]:
    """Return the YAML names of the fields of the model at a location, by walking the models' declarations."""
    model: type[BaseModel] = DCPDisaggDeployment
    for step in location:
        for field in model.model_fields.values():
            if field.alias == step:
                annotations: tuple[object, ...] = (field.annotation, *get_args(field.annotation))
                model = next(filter(_is_model, annotations), model)
    return [field.alias or name for name, field in model.model_fields.items()]


def _is_model(annotation: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _finding(path: str, message: str) -> Finding:
    return Finding(SCHEMA_RULE, path, message)
