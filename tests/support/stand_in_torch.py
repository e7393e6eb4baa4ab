"""As much of torch as moves a device's memory, with streams that run only when somebody waits for them.

What is launched on a stream is queued. It runs, in order, once the host waits for an event that was recorded behind it.
That is the latest that a device may do it, so whoever reads memory without waiting for the right stream reads what
was there before, in every run and not in one of a thousand. Memory of the "device" is the host's: a TransferEngine
knows addresses and no streams.

A test puts it where `import torch` finds it, which is where the product gets torch from.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from tests.support.kv_oracle import Rank

DEVICE = "cuda:0"
#: What memory holds before anything is written into it.
_GARBAGE = 0xEE


class Stream:
    """Work of a device that runs in the order in which it was launched."""

    def __init__(self, name: str, device: str = DEVICE) -> None:
        self.name, self.device = name, device
        self._lock = threading.RLock()
        self._queue: deque[Callable[[], None]] = deque()
        self.num_launched = self.num_done = 0

    def launch(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._queue.append(work)
            self.num_launched += 1

    def run_until(self, position: int) -> None:
        """Do everything up to a position, which is what waiting for it means."""
        with self._lock:
            while self.num_done < position:
                self._queue.popleft()()
                self.num_done += 1

    def synchronize(self) -> None:
        self.run_until(self.num_launched)


class Event:
    """A mark in a stream. Like torch's, it is reached at once as long as it isn't recorded."""

    def __init__(self, recorded: list[Event]) -> None:
        self._recorded = recorded
        self.stream: Stream | None = None
        self.position = 0
        self.waiters: list[str] = []

    def record(self, stream: Stream) -> None:
        self.stream, self.position = stream, stream.num_launched
        self._recorded.append(self)

    def synchronize(self) -> None:
        self.waiters.append(threading.current_thread().name)
        if self.stream is not None:
            self.stream.run_until(self.position)


class Storage:
    """An allocation of bytes."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory

    def data_ptr(self) -> int:
        return int(self.memory.ctypes.data)

    def nbytes(self) -> int:
        return self.memory.nbytes


class Tensor:
    """A view of an allocation on the device or on the host."""

    def __init__(self, torch: StandInTorch, storage: Storage, array: np.ndarray, where: str, pinned: bool) -> None:
        self._torch, self._storage, self.array = torch, storage, array
        self.device, self.is_cuda, self.pinned = where, where == DEVICE, pinned
        self.shape: tuple[int, ...] = array.shape

    def _like(self, array: np.ndarray) -> Tensor:
        return Tensor(self._torch, self._storage, array, self.device, self.pinned)

    def set_(self, storage: Storage) -> Tensor:
        return Tensor(self._torch, storage, storage.memory, self.device, self.pinned)

    def untyped_storage(self) -> Storage:
        return self._storage

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def element_size(self) -> int:
        return self.array.itemsize

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def __getitem__(self, part: slice) -> Tensor:
        return self._like(self.array[part])

    def view(self, *shape: int) -> Tensor:
        return self._like(self.array.reshape(shape))

    def pin_memory(self) -> Tensor:
        return self._torch.new(self.array.copy(), "cpu", pinned=True)

    def copy_(self, source: Tensor, non_blocking: bool = False) -> None:
        assert non_blocking, "the host would wait for the model's kernels"
        for side in (self, source):
            if not side.is_cuda and not side.pinned:
                self._torch.pageable.append(f"copy of {source.array.nbytes} bytes")
        target, values = self.array, source.array
        self._torch.launch("copy", lambda: np.copyto(target, values))

    def to(self, device: str, non_blocking: bool = False) -> Tensor:
        if device == self.device:
            return self
        moved = self._torch.new(np.empty_like(self.array), device)
        moved.copy_(self, non_blocking=non_blocking)
        return moved

    def index_copy_(self, dim: int, index: Tensor, source: Tensor) -> None:
        assert dim == 0
        assert index.is_cuda
        assert source.is_cuda
        target, rows, values = self.array, index.array, source.array

        def put() -> None:
            target[rows] = values

        self._torch.launch("index_copy", put)


@dataclass
class StandInTorch:
    """Stands where the module `torch` is expected. What was launched, allocated and recorded is kept."""

    uint8 = np.uint8
    #: (what, stream) of everything that was launched, in order
    launched: list[tuple[str, Stream]] = field(default_factory=list[tuple[str, Stream]])
    #: tensors that were made with `zeros`
    allocated: list[Tensor] = field(default_factory=list[Tensor])
    #: copies between the device and host memory that isn't page-locked: the host waits for each of them
    pageable: list[str] = field(default_factory=list[str])
    events: list[Event] = field(default_factory=list[Event])
    streams: list[Stream] = field(default_factory=list[Stream])

    def __post_init__(self) -> None:
        self.default = Stream("default")
        self._local = threading.local()
        self.cuda = SimpleNamespace(
            Stream=self._new_stream,
            Event=lambda: Event(self.events),
            current_stream=self._current_stream,
            stream=self._use_stream,
        )

    def launch(self, what: str, work: Callable[[], None]) -> None:
        """Launch a kernel on this thread's stream."""
        stream = self._current_stream()
        self.launched.append((what, stream))
        stream.launch(work)

    def new(self, array: np.ndarray, where: str, *, pinned: bool = False) -> Tensor:
        storage = Storage(array.reshape(-1).view(np.uint8))
        return Tensor(self, storage, array, where, pinned)

    def zeros(self, size: int, dtype: type[np.uint8], device: str = "cpu", pin_memory: bool = False) -> Tensor:
        made = self.new(np.full(size, _GARBAGE, dtype), device, pinned=pin_memory)
        self.allocated.append(made)
        if made.is_cuda:
            self.launch("fill", lambda: made.array.fill(0))
        else:
            made.array.fill(0)
        return made

    def empty(self, size: int, dtype: type[np.uint8], device: str) -> Tensor:
        return self.new(np.full(size, _GARBAGE, dtype), device)

    def from_numpy(self, array: np.ndarray) -> Tensor:
        return self.new(array, "cpu")

    def index_select(self, source: Tensor, dim: int, index: Tensor) -> Tensor:
        assert dim == 0
        assert index.is_cuda
        found = self.new(np.full((len(index.array), *source.shape[1:]), _GARBAGE, source.array.dtype), source.device)
        values, rows, target = source.array, index.array, found.array
        self.launch("index_select", lambda: np.copyto(target, values[rows]))
        return found

    def tensors_of(self, rank: Rank) -> dict[str, Tensor]:
        """One view per layer of the rank's memory, which is the device's."""
        storage, found = Storage(rank.memory), dict[str, Tensor]()
        for number, page in enumerate(rank.pages):
            shape = (page.num_blocks, page.num_heads, page.kernel_block_size, page.entry_bytes)
            strides = (page.block_stride, page.head_stride, page.row_stride, 1)
            begin = rank.memory[page.base - rank.address :]
            array = np.lib.stride_tricks.as_strided(begin, shape, strides)
            found[f"layer.{rank.first_layer + number}"] = Tensor(self, storage, array, DEVICE, pinned=False)
        return found

    def _new_stream(self, device: str) -> Stream:
        self.streams.append(Stream(f"stream {len(self.streams)}", device))
        return self.streams[-1]

    def _current_stream(self, device: str = DEVICE) -> Stream:
        assert device == DEVICE
        return getattr(self._local, "stream", self.default)

    @contextmanager
    def _use_stream(self, stream: Stream) -> Iterator[None]:
        before, self._local.stream = self._current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before
