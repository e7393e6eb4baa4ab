"""Registered KV tensors: from shape and strides to page layouts, and gathers into staging memory.

torch is needed only to gather from device memory; its tensors are described by a protocol, so that this module loads
without it.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dcp_connector.errors import StartupError
from dcp_connector.geometry import GeometryError, PageLayout, SideLayout
from dcp_connector.packing import Gather, gather_unit_bytes

if TYPE_CHECKING:
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]


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


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """One layer's registered tensor and where it keeps its entries."""

    name: str
    tensor: Tensor
    page: PageLayout


def describe(name: str, tensor: Tensor, side: SideLayout, num_blocks: int) -> LayerTensor:
    """Return where a registered tensor keeps (kernel block, head, row), from its shape and strides alone.

    vLLM registers views of shape [kernel blocks, heads, rows, C], or [kernel blocks, rows, C] with one head; the
    strides give the physical order. `num_blocks` are the scheduler's blocks; the tensor may cut each into several.
    Raises StartupError for anything else: an unknown layout must not be guessed.
    """
    if str(tensor.device).partition(":")[0] not in _DEVICES:
        raise StartupError(
            f"the KV tensor of {name} is on device {tensor.device}; this connector moves memory of cpu or cuda (also "
            "ROCm's) only"
        )
    shape, stride, item = tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
    if len(shape) == 3:
        shape, stride = (shape[0], 1, *shape[1:]), (stride[0], stride[0], *stride[1:])
    problem = _problem(shape, stride, side, num_blocks)
    if problem:
        raise StartupError(
            f"the KV tensor of {name} has shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())}, "
            f"which this connector doesn't understand: {problem}"
        )
    try:
        page = PageLayout(
            base=tensor.data_ptr(),
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
    """Return (address, bytes) of each distinct allocation behind the tensors, once: layers may share one."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values()}
    return tuple(sorted(found.items()))


class Staging:
    """Memory that packed rows are gathered into, one slot of it per transfer thread.

    `gather` fills a slot's bytes from a layer; `address(slot)` is where the TransferEngine reads them. Staging lives on
    the tensors' own device, so that packed bytes never cross a bus twice.
    """

    def __init__(self, layers: tuple[LayerTensor, ...], slot_bytes: int, num_slots: int) -> None:
        self.slot_bytes = slot_bytes
        self._layers = layers
        on_device = layers[0].tensor.is_cuda
        total = slot_bytes * num_slots
        if on_device:
            self._gather, self.base, self._keep = _device_gather(layers, total)
        else:
            buffer: Bytes = np.zeros(total, dtype=np.uint8)
            self._gather, self.base, self._keep = _host_gather(layers, buffer), int(buffer.ctypes.data), buffer
        self.num_bytes = total

    def offset(self, slot: int) -> int:
        """Return where a slot begins, in bytes from `base`."""
        return slot * self.slot_bytes

    def gather(self, slot: int, gathers: tuple[Gather, ...], layers: tuple[int, ...]) -> None:
        """Fill a slot. `layers[g.layer]` is the index of a gather's layer in the constructor's `layers`."""
        for item in gathers:
            self._gather(self.offset(slot) + item.staging_offset, layers[item.layer], item)


_GatherOne = Callable[[int, int, Gather], None]


def _host_gather(layers: tuple[LayerTensor, ...], buffer: Bytes) -> _GatherOne:
    """Gather with numpy, which releases the interpreter lock and copies unit by unit."""
    sources: list[Bytes] = []
    for layer in layers:
        unit = gather_unit_bytes(layer.page)
        count = layer.page.span_bytes // unit
        raw = (ctypes.c_uint8 * (count * unit)).from_address(layer.page.base)
        sources.append(np.ctypeslib.as_array(raw).reshape(count, unit))

    def gather(offset: int, layer: int, item: Gather) -> None:
        size = len(item.units) * item.unit_bytes
        out = buffer[offset : offset + size].reshape(len(item.units), item.unit_bytes)
        # "clip" avoids a second copy of the output; the units were checked against the page when they were planned.
        np.take(sources[layer], item.units, axis=0, out=out, mode="clip")

    return gather


def _device_gather(layers: tuple[LayerTensor, ...], total: int) -> tuple[_GatherOne, int, Any]:
    """Gather with torch on a side stream, so that the model's own stream is never waited for."""
    torch: Any = importlib.import_module("torch")
    device = layers[0].tensor.device
    buffer = torch.empty(total, dtype=torch.uint8, device=device)
    stream = torch.cuda.Stream(device=device)
    sources: list[Any] = []
    for layer in layers:
        unit = gather_unit_bytes(layer.page)
        storage = layer.tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        sources.append(
            flat.as_strided((layer.page.span_bytes // unit, unit), (unit, 1), layer.page.base - storage.data_ptr())
        )

    def gather(offset: int, layer: int, item: Gather) -> None:
        size = len(item.units) * item.unit_bytes
        with torch.cuda.stream(stream):
            units = torch.from_numpy(item.units.copy()).to(device)
            out = buffer[offset : offset + size].view(len(item.units), item.unit_bytes)
            torch.index_select(sources[layer], 0, units, out=out)
        stream.synchronize()

    return gather, int(buffer.data_ptr()), buffer


class Fence(Protocol):
    """Something to wait for before memory is read."""

    def synchronize(self) -> None:
        """Wait."""
        ...


def fence(tensor: Tensor) -> Fence | None:
    """Return a fence behind everything that was launched on this thread's stream, or None where memory is the host's.

    Called on the engine's thread in the step after a prompt was computed; waited for by the sending thread.
    """
    if not tensor.is_cuda:
        return None
    torch: Any = importlib.import_module("torch")
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event
