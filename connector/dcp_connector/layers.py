"""The registered layers as page sets: keys and values that lie together, apart, or with another layer's.

vLLM packs a token's key and value of one head into one entry, key first. Attention backends from elsewhere may keep
them apart: as two tensors, or as one with a dimension of size 2 before or behind the blocks. Then a layer has two page
sets (`page_sets`), each described like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from dcp_connector.errors import StartupError
from dcp_connector.page_sets import KEYS, VALUES, halves
from dcp_connector.tensors import LayerTensor, Tensor, View, describe, find_problem, view_of

if TYPE_CHECKING:
    from dcp_connector.geometry import PageLayout, SideLayout

__all__ = ["Registered", "flatten", "read_layers", "with_halves"]

#: What vLLM registers for a layer: a tensor, or one for keys and one for values.
Registered: TypeAlias = Tensor | Sequence[Tensor]


def flatten(registered: Mapping[str, Registered]) -> dict[str, Tensor]:
    """Return every tensor under a name of its own. Raises StartupError for a layer that has more than two."""
    found: dict[str, Tensor] = {}
    for name, value in registered.items():
        if not isinstance(value, Sequence):
            found[name] = value
        elif len(value) == 2:
            found[name + KEYS], found[name + VALUES] = value
        else:
            raise StartupError(
                f"{name} has {len(value)} KV tensors; this connector knows one, or one of keys and one of values"
            )
    return found


def read_layers(registered: Mapping[str, Registered], side: SideLayout, num_blocks: int) -> tuple[LayerTensor, ...]:
    """Return the page sets of all layers, each memory once: a layer that reuses another's cache has none of its own.

    Raises StartupError for a tensor that isn't understood, or that could be read in two ways.
    """
    found: list[LayerTensor] = []
    seen: set[PageLayout] = set()
    for name, tensor in flatten(registered).items():
        for layer in _page_sets(name, tensor, side, num_blocks):
            if layer.page not in seen:
                seen.add(layer.page)
                found.append(layer)
    return tuple(found)


def with_halves(layers: tuple[LayerTensor, ...], key_bytes: int) -> tuple[LayerTensor, ...]:
    """Return the layers, and the keys and values of those that pack both into one entry, as a peer may ask for them."""
    apart = tuple(
        replace(layer, name=name, page=half)
        for layer in layers
        for name, half in halves(layer.name, layer.page, key_bytes).items()
    )
    return layers + apart


def _page_sets(name: str, tensor: Tensor, side: SideLayout, num_blocks: int) -> list[LayerTensor]:
    """Return one page set for a tensor of whole entries, two where a dimension of size 2 tells keys from values."""
    whole = view_of(tensor)
    readings = [] if find_problem(whole, side, num_blocks) is None else _readings(whole, side, num_blocks)
    if not readings:
        return [describe(name, tensor, side, num_blocks)]
    if len(readings) > 1:
        raise StartupError(
            f"the KV tensor of {name} has shape {whole.shape} and strides {whole.stride}, which can be read in "
            f"{len(readings)} ways as keys and values of {num_blocks} blocks of {side.heads_per_rank} heads and "
            f"{side.block_size} rows: change the block size"
        )
    return [
        describe(name + suffix, tensor, side, num_blocks, part=part)
        for suffix, part in zip((KEYS, VALUES), readings[0], strict=True)
    ]


def _readings(whole: View, side: SideLayout, num_blocks: int) -> list[tuple[View, View]]:
    """Return every way to see keys and values in a tensor. Heads come before rows or behind them, both are in use."""
    found: list[tuple[View, View]] = []
    for axis in (0, 1):
        if len(whole.shape) not in (4, 5) or whole.shape[axis] != 2:
            continue
        shape, stride = list(whole.shape), list(whole.stride)
        del shape[axis], stride[axis]
        for order in ((0, 1, 2),) if len(shape) == 3 else ((0, 1, 2, 3), (0, 2, 1, 3)):
            keys = View(tuple(shape[i] for i in order), tuple(stride[i] for i in order), 0)
            if find_problem(keys, side, num_blocks) is None:
                found.append((keys, keys._replace(offset=whole.stride[axis])))
    return found
