"""The names of page sets, and how sides that keep keys and values together or apart still fit.

A layer whose entries hold a key and a value, one behind the other, is one page set under the layer's own name. Where
they lie apart it is two, `NAME/k` and `NAME/v`. An entry that holds both is two smaller ones at the same strides, so
a side that packs can be asked for keys and values, and can ask for its own in two pieces.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from dcp_connector.geometry import PageLayout
from dcp_connector.wire import Page

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["KEYS", "VALUES", "askable", "halves", "layer_of", "offered"]

KEYS, VALUES = "/k", "/v"

_PageT = TypeVar("_PageT", Page, PageLayout)


def layer_of(name: str) -> str:
    """Return the layer that a page set belongs to."""
    return name.removesuffix(KEYS).removesuffix(VALUES)


def halves(name: str, page: _PageT, key_bytes: int) -> dict[str, _PageT]:
    """Return the key's and the value's part of packed entries as page sets; nothing where entries are not both.

    `key_bytes` are those of the key, 0 if an entry can't be cut.
    """
    if name != layer_of(name) or not 0 < key_bytes < page.entry_bytes:
        return {}
    return {
        name + KEYS: _part(page, 0, key_bytes),
        name + VALUES: _part(page, key_bytes, page.entry_bytes - key_bytes),
    }


def offered(pages: Mapping[str, Page], key_bytes: int) -> dict[str, Page]:
    """Return everything that a side with these pages can be asked for."""
    found = dict(pages)
    for name, page in pages.items():
        found |= halves(name, page, key_bytes)
    return found


def askable(ours: Mapping[str, Page], theirs: Mapping[str, Page], key_bytes: int) -> dict[str, Page]:
    """Return our pages under the names and in the pieces in which `theirs`, a peer's own, can be asked for.

    `key_bytes` is ours. A page that the peer has in no form keeps its name; the handshake refuses such a peer.
    """
    found: dict[str, Page] = {}
    for name, page in ours.items():
        apart = halves(name, page, key_bytes)
        found |= apart if apart and name not in theirs and apart.keys() <= theirs.keys() else {name: page}
    return found


def _part(page: _PageT, offset: int, entry_bytes: int) -> _PageT:
    """Return the page of `entry_bytes` of each entry, from `offset` on."""
    if isinstance(page, PageLayout):
        return replace(page, base=page.base + offset, entry_bytes=entry_bytes)
    return Page(
        page.base + offset,
        page.num_blocks,
        page.kernel_block_size,
        page.block_stride,
        page.head_stride,
        page.row_stride,
        entry_bytes,
    )
