"""The facts of widely served models, so that an object need not state them.

Built in are the models of models.json, each with its source; an installation adds its own, or other numbers for the
same names, with a ConfigMap (`dcp_operator.catalogue_file`). Facts that spec.model.geometry states go before these.
"""

import json
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from dcp_operator.catalogue.entries import read_entries
from dcp_operator.catalogue.facts import ModelFacts

__all__ = ["Catalogue", "ModelFacts", "builtin", "read_entries"]

_HUGGING_FACE = "hf://"


class Catalogue:
    """Models by name. Never changes: another file makes another catalogue."""

    def __init__(self, models: Iterable[ModelFacts]) -> None:
        #: All models, in their order.
        self.models = tuple(models)
        # Hugging Face finds a repository whatever the case of its letters; of two entries the later one counts.
        self._by_name = {_plain(name): model for model in self.models for name in model.names}

    def lookup(self, uri: str) -> ModelFacts | None:
        """Return what is known of a model by its spec.model.uri or its bare repository name; None for others.

        The revision is not looked at: the numbers of a repository don't change with it.
        """
        return self._by_name.get(_plain(uri))

    def with_models(self, models: Iterable[ModelFacts]) -> "Catalogue":
        """Return a catalogue that has these too; where a name is known already, the new entry counts."""
        return Catalogue([*self.models, *models])


@cache
def builtin() -> Catalogue:
    """Return the catalogue of this release. The file is read once per process."""
    text = files("dcp_operator.catalogue").joinpath("models.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return Catalogue(ModelFacts.model_validate(row, by_alias=True, by_name=False) for row in content["models"])


def _plain(name: str) -> str:
    return name.removeprefix(_HUGGING_FACE).casefold()
