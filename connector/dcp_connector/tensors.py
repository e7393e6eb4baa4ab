"""Registered KV tensors: from shape and strides to page layouts.

torch's tensors are described by a protocol, so that this module loads without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dcp_connector.errors import StartupError
from dcp_connector.geometry import GeometryError, PageLayout, SideLayout

#: torch's device types whose memory can be registered, read and waited for. ROCm calls itself cuda.
_DEVICES = ("cpu", "cuda")


class Storage(Protocol):
    """torch.UntypedStorage, as far as it is used."""

    def data_ptr(self) -> int:
        """Address."""
        ...

    def nbytes(self) -> int:
        """Size."""
        ...


class Tensor(Protocol):
    """torch.Tensor, as far as it is used."""

    shape: tuple[int, ...]
    is_cuda: bool
    device: Any

    def stride(self) -> tuple[int, ...]:
        """Elements from one index of each dimension to the next."""
        ...

    def data_ptr(self) -> int:
        """Address of the first element."""
        ...

    def element_size(self) -> int:
        """Bytes of an element."""
        ...

    def untyped_storage(self) -> Storage:
        """The allocation behind the tensor; other tensors may share it."""
        ...


class View(NamedTuple):
    """A part of a tensor: its own shape and strides, and where it begins; all in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """One layer's registered tensor, or a part of it, and where it keeps its entries."""

    name: str
    tensor: Tensor
    page: PageLayout


def view_of(tensor: Tensor) -> View:
    """Return the whole tensor as a view."""
    return View(tuple(tensor.shape), tuple(tensor.stride()), 0)


def find_problem(view: View, side: SideLayout, num_blocks: int) -> str | None:
    """Return why a view is not [kernel blocks, heads, rows, C] or [kernel blocks, rows, C] of this side, or None."""
    return _problem(*_with_heads(view.shape, view.stride), side, num_blocks)


def describe(name: str, tensor: Tensor, side: SideLayout, num_blocks: int, *, part: View | None = None) -> LayerTensor:
    """Return where a registered tensor keeps (kernel block, head, row), from its shape and strides alone.

    vLLM registers views of shape [kernel blocks, heads, rows, C], or [kernel blocks, rows, C] with one head; the
    strides give the physical order. `num_blocks` are the scheduler's blocks; the tensor may cut each into several.
    `part` is the view of the tensor that is meant, if not all of it (`layers` finds keys and values that lie apart).
    Raises StartupError for anything else: an unknown layout must not be guessed.
    """
    if str(tensor.device).partition(":")[0] not in _DEVICES:
        raise StartupError(
            f"the KV tensor of {name} is on device {tensor.device}; this connector moves memory of cpu or cuda (also "
            "ROCm's) only"
        )
    view, item = part or view_of(tensor), tensor.element_size()
    shape, stride = _with_heads(view.shape, view.stride)
    problem = _problem(shape, stride, side, num_blocks)
    if problem:
        raise StartupError(
            f"the KV tensor of {name} has shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())}, "
            f"which this connector doesn't understand: {problem}"
        )
    try:
        page = PageLayout(
            base=tensor.data_ptr() + view.offset * item,
            num_blocks=shape[0],
            kernel_block_size=shape[2],
            block_size=side.block_size,
            num_heads=shape[1],
            block_stride=stride[0] * item,
            head_stride=stride[1] * item,
            row_stride=stride[2] * item,
            entry_bytes=shape[3] * item,
        )
    except GeometryError as error:
        raise StartupError(f"the KV tensor of {name} can't be described: {error}") from error
    return LayerTensor(name, tensor, page)


def _with_heads(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides with a dimension of one head where there is none."""
    if len(shape) != 3:
        return shape, stride
    return (shape[0], 1, *shape[1:]), (stride[0], stride[0], *stride[1:])


def _problem(shape: tuple[int, ...], stride: tuple[int, ...], side: SideLayout, num_blocks: int) -> str | None:
    if len(shape) != 4:
        return "expected [blocks, heads, rows, bytes of an entry]"
    if stride[3] != 1 and shape[3] != 1:
        return "an entry's elements are not contiguous"
    if shape[1] != side.heads_per_rank:
        return f"expected {side.heads_per_rank} heads on this rank"
    if shape[0] % num_blocks or shape[2] * (shape[0] // num_blocks) != side.block_size:
        return f"expected {num_blocks} blocks of {side.block_size} rows, whole or cut into kernel blocks"
    return None


def storages(tensors: Mapping[str, Tensor]) -> tuple[tuple[int, int], ...]:
    """Return (address, bytes) of each allocation behind the tensors, once: layers may share one.

    Ranges that overlap are one: the TransferEngine refuses to register a byte twice.
    """
    found: list[tuple[int, int]] = []
    for address, size in sorted(
        (t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors.values()
    ):
        if found and address < sum(found[-1]):
            first, length = found[-1]
            found[-1] = first, max(length, address + size - first)
        else:
            found.append((address, size))
    return tuple(found)


class Fence(Protocol):
    """Something to wait for before memory is read."""

    def synchronize(self) -> None:
        """Wait."""
        ...


def fence(tensor: Tensor) -> Fence | None:
    """Return a fence behind everything that was launched on this thread's stream, or None where memory is the host's.

    Called on the engine's thread in the step after a prompt was computed; waited for by the sending thread. vLLM
    launches the kernels that write KV on this thread's current stream. It calls `start_load_kv` there in a later step,
    before or behind that step's kernels (v1/worker/kv_connector_model_runner_mixin.py): behind the prompt's anyway.
    """
    if not tensor.is_cuda:
        return None
    torch: Any = importlib.import_module("torch")
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event
