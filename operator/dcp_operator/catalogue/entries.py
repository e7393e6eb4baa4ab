"""From a parsed catalogue file to models and, in words, what is wrong with it."""

from collections.abc import Mapping
from typing import Any, cast

from pydantic import ValidationError

from dcp_operator.api.findings import kind_of, one_line, show
from dcp_operator.api.load import json_path
from dcp_operator.catalogue.facts import ModelFacts

#: A ConfigMap holds a mebibyte; more models than this are a mistake.
_MOST_MODELS = 5000
_MESSAGE_CHARACTERS = 300


def read_entries(content: object) -> tuple[list[ModelFacts], list[str]]:
    """Return the models of a file `{"models": [...]}`, and one sentence for each entry that is left out.

    An entry that is wrong is left out by itself: the others are as good as before. Never fails.
    """
    if content is None:
        return [], []
    document = cast("Mapping[str, Any]", content) if isinstance(content, Mapping) else dict[str, Any]()
    if not isinstance(document.get("models"), list):
        return [], [
            f"found {kind_of(cast('object', content))}, must be a map with a list of models under the key models"
        ]
    rows = cast("list[Any]", document["models"])
    problems = [f"{key}: is not a key of a catalogue; its only key is models" for key in document if key != "models"]
    if len(rows) > _MOST_MODELS:
        return [], [*problems, f"models: has {len(rows)} entries, at most {_MOST_MODELS} are allowed"]
    models: list[ModelFacts] = []
    for index, row in enumerate(rows):
        try:
            models.append(ModelFacts.model_validate(row, by_alias=True, by_name=False))
        except ValidationError as error:
            problems.append(_sentence(index, error))
    return models, [one_line(problem, _MESSAGE_CHARACTERS) for problem in problems]


def _sentence(index: int, error: ValidationError) -> str:
    detail = error.errors(include_url=False)[0]
    path = json_path(["models", index, *detail["loc"]])
    more = error.error_count() - 1
    others = f" (and {more} more)" if more else ""
    match detail["type"]:
        case "missing":
            said = "is required"
        case "extra_forbidden":
            said = f"is not a field of a model; its fields are {', '.join(_field_names())}"
        case "model_type":
            said = f"found {kind_of(detail['input'])}, must be a map"
        case "too_short":
            said = "is empty"
        case "value_error":
            said = detail["msg"].removeprefix("Value error, ")
        case _:
            # pydantic's sentences read on from "the input": Input should be greater than 0.
            said = f"found {show(detail['input'])}, which {detail['msg'].removeprefix('Input ')}"
    return f"{path}: {said}{others}; the entry is left out"


def _field_names() -> list[str]:
    return [field.alias or name for name, field in ModelFacts.model_fields.items()]
