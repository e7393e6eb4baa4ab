"""What is known of an object's model: what the object states of it, and what the catalogue knows."""

from dataclasses import dataclass

from dcp_operator.api.spec import Geometry, Layout, Model
from dcp_operator.catalogue import Catalogue


@dataclass(frozen=True, slots=True)
class Facts:
    """The model's heads, lengths and layers, and where they were found."""

    geometry: Geometry
    layout: Layout
    is_stated: bool

    def path(self, field: str) -> str:
        """Return how a message names one of the facts."""
        return f"spec.model.geometry.{field}" if self.is_stated else f"the catalogue's {field}"

    @property
    def keeps_every_token(self) -> bool:
        """Whether every layer caches every token, as decode context parallelism needs it."""
        return self.layout in ("full", "sparse")


def model_facts(model: Model, catalogue: Catalogue) -> Facts | None:
    """Return what is known of a model, None if nothing is. What the object states goes before the catalogue."""
    known = catalogue.lookup(model.uri)
    stated = model.geometry
    layout: Layout = (stated.layout if stated else None) or (known.layout if known else None) or "full"
    if stated is not None:
        return Facts(stated, layout, is_stated=True)
    return Facts(known.geometry, layout, is_stated=False) if known is not None else None
