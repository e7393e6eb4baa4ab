"""Staging memory between KV tensors and the TransferEngine: gather on prefill, scatter on decode.

Tensors in host memory are moved by numpy, which releases the interpreter lock and copies unit by unit. Tensors on a
device are moved by torch on a stream of its own, so that the model's stream is never waited for and never waits. torch
is imported only there.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import importlib
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from dcp_connector.geometry import PageLayout
    from dcp_connector.pages import StagedUnits
    from dcp_connector.tensors import Tensor

    Bytes = npt.NDArray[np.uint8]

#: Where staging memory of tensors on a device lies: beside them, or in page-locked host memory.
Where = Literal["device", "host"]

#: Index arrays kept on a device. The layers of a transfer share a few.
_MAX_INDICES = 16


class Mover(Protocol):
    """Copies units between staging memory, from byte `offset` on, and pages. Returns when the bytes are there.

    `pages[item.layer]` is the page of an item. Thread-safe for disjoint ranges of staging memory.
    """

    base: int

    def gather(self, offset: int, items: Sequence[StagedUnits], pages: Sequence[PageLayout]) -> None:
        """Fill staging memory from the pages."""
        ...

    def scatter(self, offset: int, items: Sequence[StagedUnits], pages: Sequence[PageLayout]) -> None:
        """Fill the pages from staging memory."""
        ...


class Staging:
    """`num_slots` slots of `slot_bytes` bytes, one allocation from address `base` on.

    `tensors` are those that the pages lie in; they are all on one device, or in host memory.
    """

    def __init__(self, tensors: Sequence[Tensor], slot_bytes: int, num_slots: int, where: Where = "device") -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self.num_bytes = slot_bytes * num_slots
        self._mover = make_mover(tensors, self.num_bytes, where)
        self.base = self._mover.base

    def address(self, slot: int) -> int:
        """Return where a slot begins."""
        return self.base + slot * self.slot_bytes

    def gather(self, slot: int, items: Sequence[StagedUnits], pages: Sequence[PageLayout]) -> None:
        """Fill a slot. `pages[item.layer]` is the page that an item's units are in."""
        self._mover.gather(slot * self.slot_bytes, items, pages)

    def scatter(self, slot: int, items: Sequence[StagedUnits], pages: Sequence[PageLayout]) -> None:
        """Put what lies in a slot where it belongs; arguments as in `gather`."""
        self._mover.scatter(slot * self.slot_bytes, items, pages)


def make_mover(tensors: Sequence[Tensor], num_bytes: int, where: Where) -> Mover:
    """Return what moves units of these tensors."""
    return TorchMover(tensors, num_bytes, where) if tensors[0].is_cuda else NumpyMover(num_bytes)


class NumpyMover:
    """Moves host memory. A unit is one element of numpy's void type, which is copied by one memmove.

    Units were checked against the page when they were planned. Mode "clip" skips numpy's own check, and with it a
    second copy of the output.
    """

    def __init__(self, num_bytes: int) -> None:
        self._buffer: Bytes = np.zeros(num_bytes, dtype=np.uint8)
        self.base = int(self._buffer.ctypes.data)

    def gather(self, offset: int, items: Sequence[StagedUnits], pages: Sequence[PageLayout]) -> None:
        """Fill staging memory."""
        for item in items:
            tensor, part = self._views(offset, item, pages[item.layer])
            np.take(tensor, item.units, out=part, mode="clip")

    def scatter(self, offset: int, items: Sequence[StagedUnits], pages: Sequence[PageLayout]) -> None:
        """Empty staging memory."""
        for item in items:
            tensor, part = self._views(offset, item, pages[item.layer])
            np.put(tensor, item.units, part, mode="clip")

    def _views(self, offset: int, item: StagedUnits, page: PageLayout) -> tuple[Any, Any]:
        unit = np.dtype((np.void, item.unit_bytes))
        size = page.span_bytes // item.unit_bytes * item.unit_bytes
        tensor = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(page.base))
        begin = offset + item.staging_offset
        end = begin + len(item.units) * item.unit_bytes
        return tensor.view(unit), self._buffer[begin:end].view(unit)


class TorchMover:
    """Moves memory of one torch device. Everything is launched on a stream of its own and waited for at the end.

    With staging on the "host" a gather goes through memory on the device and one copy over the bus, so that the bus
    sees a few large copies. Tensors in host memory work too, without a stream: that is how this code is tested.
    """

    def __init__(self, tensors: Sequence[Tensor], num_bytes: int, where: Where = "device") -> None:
        torch: Any = importlib.import_module("torch")
        self._torch = torch
        self._device = tensors[0].device
        self._on_cuda = bool(tensors[0].is_cuda)
        self._through_host = where == "host"
        self._stream = torch.cuda.Stream(device=self._device) if self._on_cuda else None
        with self._launching():
            self._buffer = (
                torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._on_cuda)
                if self._through_host
                else torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
            )
        # Peers write here unasked by any stream: it has to be cleared before they learn of it, not behind their bytes.
        self._wait()
        self.base = int(self._buffer.data_ptr())
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._starts = sorted(storages)
        self._storages: list[Any] = [
            torch.empty(0, dtype=torch.uint8, device=self._device).set_(storages[start]) for start in self._starts
        ]
        self._lock = threading.Lock()
        self._indices: OrderedDict[int, tuple[Any, Any]] = OrderedDict()

    def gather(self, offset: int, items: Sequence[StagedUnits], pages: Sequence[PageLayout]) -> None:
        """Fill staging memory."""
        with self._launching():
            for item in items:
                tensor, part = self._views(offset, item, pages[item.layer])
                rows = self._torch.index_select(tensor, 0, self._index(item.units))
                part.copy_(rows, non_blocking=True)
        self._wait()

    def scatter(self, offset: int, items: Sequence[StagedUnits], pages: Sequence[PageLayout]) -> None:
        """Empty staging memory."""
        with self._launching():
            for item in items:
                tensor, part = self._views(offset, item, pages[item.layer])
                rows = part.to(self._device, non_blocking=True)
                tensor.index_copy_(0, self._index(item.units), rows)
        self._wait()

    def _views(self, offset: int, item: StagedUnits, page: PageLayout) -> tuple[Any, Any]:
        which = bisect.bisect_right(self._starts, page.base) - 1
        first = page.base - self._starts[which]
        count = page.span_bytes // item.unit_bytes
        begin = offset + item.staging_offset
        end = begin + len(item.units) * item.unit_bytes
        return (
            self._storages[which][first : first + count * item.unit_bytes].view(count, item.unit_bytes),
            self._buffer[begin:end].view(len(item.units), item.unit_bytes),
        )

    def _index(self, units: npt.NDArray[np.int64]) -> Any:
        """Return the units on the device; layers that share the array share the copy."""
        with self._lock:
            kept = self._indices.get(id(units))
        # The array is kept with its copy: as long as it lives no other one has its id.
        if kept is not None and kept[0] is units:
            return kept[1]
        index = self._torch.from_numpy(units.copy())
        if self._on_cuda:
            index = index.pin_memory().to(self._device, non_blocking=True)
        with self._lock:
            self._indices[id(units)] = units, index
            while len(self._indices) > _MAX_INDICES:
                self._indices.popitem(last=False)
        return index

    def _launching(self) -> contextlib.AbstractContextManager[Any]:
        return self._torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()

    def _wait(self) -> None:
        if self._stream is not None:
            done = self._torch.cuda.Event()
            done.record(self._stream)
            done.synchronize()
