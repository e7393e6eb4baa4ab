"""Units and small types that the pure modules share.

Head numbers come in two kinds that look alike and mean different things, so the type checker keeps them apart:
a `GlobalHead` counts over the whole model, a `LocalHead` counts within one rank's tensor.
Sizes are plain integers whose name carries the unit: `num_tokens`, `length_bytes`, `block` (an id or an index of a
scheduler block), `kernel_block` (an id of an attention kernel's block).

Nothing here imports numpy at run time, so that the operator can use the geometry without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NewType, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["KIB", "MIB", "GlobalHead", "IntArray", "LayoutError", "LocalHead", "cdiv"]

KIB = 1024
MIB = 1024 * KIB

#: A KV head counted over the model: 0 <= head < num_kv_heads.
GlobalHead = NewType("GlobalHead", int)
#: A KV head counted within one rank's registered tensor: 0 <= head < heads of that rank.
LocalHead = NewType("LocalHead", int)

#: One-dimensional int64 array.
IntArray: TypeAlias = "npt.NDArray[np.int64]"


class LayoutError(ValueError):
    """Root of everything that the pure part refuses: a layout, a plan that doesn't tile, an address out of bounds."""


def cdiv(numerator: int, denominator: int) -> int:
    """Return the quotient rounded up."""
    return -(-numerator // denominator)
