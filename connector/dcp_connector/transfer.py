"""The only importer of mooncake: memory that is registered, and batches of writes into a peer's memory."""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dcp_connector.errors import ConnectorError, PeerError, Reason, StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Mooncake gives a batch up after this, counted from its start over all of its own retries (plus 1 ns a byte).
BATCH_TIMEOUT_S = 30
#: A batch that it gave up may still have parts under way, on connections that end when nothing moves on them for
#: `MC_TCP_PROGRESS_TIMEOUT_SEC`. After as long as a batch may take they are over.
STRAGGLERS_S = 30.0
#: Mooncake waits for so long for the answer of a peer that it meets for the first time.
MEETING_S = 60.0
#: How long after its start a batch may write at most.
LONGEST_WRITE_S = MEETING_S + BATCH_TIMEOUT_S + STRAGGLERS_S

#: How long a peer may take to show that it runs, when it is met for the first time; and peers that are remembered.
_GREETING_S = 3.0
_MAX_MET = 4096

#: What `transfer_submit_write` returns for a failure: -1, as the unsigned number that it is declared to return, and 0
#: when a peer can't be reached. Asking for the status of either ends the process: a batch is the address of a record.
_NO_BATCH = (-1, 2**64 - 1, 0)
#: What a write returns that isn't over after BATCH_TIMEOUT_S.
_TIMED_OUT = -2
#: Pauses between two looks at a write: short at first, and then no load.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 1e-3

#: What the bounds above rest on, so a pod's own values don't count.
_TIMEOUTS = {
    "MC_TRANSFER_TIMEOUT": str(BATCH_TIMEOUT_S),
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "15",
    "MC_TCP_STATUS_TIMEOUT_SEC": "15",
}
#: Mooncake's own limits are too small: one batch of 3,000 descriptors is refused, 4,000 wedge a session for good.
#: They are read when the library is loaded, so they have to be set before.
_LIMITS = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "60000",
}


class TransferError(ConnectorError):
    """The TransferEngine failed a batch. Parts of it may still arrive later.

    Mooncake reports a batch failed at its first failed descriptor, or at its timeout, while others are under way (its
    issue 4247).
    """


class Transport(Protocol):
    """What the sender needs of a TransferEngine."""

    #: name under which peers reach the registered memory, "host:port"
    segment: str

    def register(self, address: int, num_bytes: int) -> None:
        """Make memory usable for transfers. Raises StartupError."""
        ...

    def write(self, segment: str, src: Sequence[int], dst: Sequence[int], length: Sequence[int]) -> None:
        """Write one batch and wait for it. Raises TransferError, or PeerError if nothing was written."""
        ...


class MooncakeTransport:
    """One TransferEngine. `host` is the address at which peers reach it."""

    def __init__(self, host: str, protocol: Literal["tcp", "rdma"], device_name: str) -> None:
        self._engine = _load(protocol)()
        code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, device_name)
        if code != 0:
            raise StartupError(
                f"Mooncake's TransferEngine can't start on {host} with {protocol} (code {code}): check that the "
                "address is this pod's own (VLLM_HOST_IP) and, for RDMA, that the pod has a device"
            )
        port = self._engine.get_rpc_port()
        self.segment = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._met: dict[str, None] = {}
        self._write = self._write_asleep if protocol == "tcp" else self._engine.batch_transfer_sync_write

    def register(self, address: int, num_bytes: int) -> None:
        """Make memory readable and writable for transfers. Raises StartupError."""
        code = self._engine.register_memory(address, num_bytes)
        if code != 0:
            raise StartupError(
                f"Mooncake can't register {num_bytes} bytes of KV memory (code {code}): for RDMA check the memory lock "
                "limit of the container and nvidia-peermem or dma-buf support; code -7 means that it overlaps a range "
                "that is registered already"
            )

    def write(self, segment: str, src: Sequence[int], dst: Sequence[int], length: Sequence[int]) -> None:
        """Write one batch and wait for it. Raises TransferError; then any part of it may be written, now or later.

        Raises PeerError for a peer that isn't there; then nothing was written.
        """
        self._meet(segment)
        started = time.monotonic()
        code = self._write(segment, src, dst, length)
        if code != 0:
            took = time.monotonic() - started
            raise TransferError(
                f"a batch of {len(length)} descriptors, {sum(length)} bytes to {segment} failed after {took:.1f} s "
                f"(code {code}); Mooncake's own log on stderr says why"
            )

    def _write_asleep(self, segment: str, src: Sequence[int], dst: Sequence[int], length: Sequence[int]) -> int:
        """Write one batch and sleep until it is over. Returns 0, or a negative number if any of it failed.

        Mooncake's synchronous write polls without a pause. Over TCP the processor moves the bytes, so that takes the
        time of the very threads that it waits for; on two busy cores with Linux 6.18 it kept the whole machine from
        running for 15 s. Over TCP each descriptor is a transfer of its own in any case.
        """
        engine = self._engine
        submitted = [engine.transfer_submit_write(segment, *part) for part in zip(src, dst, length, strict=True)]
        pending = deque(batch for batch in submitted if batch not in _NO_BATCH)
        code = 0 if len(pending) == len(submitted) else -1
        until = time.monotonic() + BATCH_TIMEOUT_S + sum(length) * 1e-9
        pause_s = _SHORTEST_PAUSE_S
        while pending:
            state = engine.transfer_check_status(pending[0])
            if state == 0:
                if time.monotonic() >= until:
                    return _TIMED_OUT
                time.sleep(pause_s)
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
                continue
            code = min(code, state)
            pending.popleft()
            pause_s = _SHORTEST_PAUSE_S
        return min(code, 0)

    def _meet(self, segment: str) -> None:
        """Let Mooncake meet only peers that run: it does so under a lock, which all other writes would wait for."""
        if segment in self._met:
            return
        if not runs(segment, _GREETING_S):
            raise PeerError(Reason.PEER_LOST, f"nobody answers at {segment}, where decode wants its KV")
        self._met[segment] = None
        while len(self._met) > _MAX_MET:
            self._met.pop(next(iter(self._met)), None)


def runs(segment: str, timeout_s: float) -> bool:
    """Tell whether the TransferEngine at "host:port" runs: it hangs up on who says nothing. A frozen one doesn't."""
    host, _, port = segment.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as sock:
            sock.shutdown(socket.SHUT_WR)
            return sock.recv(1) == b""
    except ConnectionResetError:
        return True
    except (OSError, ValueError, OverflowError):
        return False


def _load(protocol: str) -> Any:
    """Import mooncake's engine with its limits raised. Raises StartupError in one sentence."""
    os.environ.update(_TIMEOUTS)
    for name, value in _LIMITS.items():
        os.environ.setdefault(name, value)
    if protocol == "tcp":
        # The protocol argument alone doesn't stop Mooncake from choosing RDMA where it finds a device.
        os.environ.setdefault("MC_FORCE_TCP", "1")
    try:
        return importlib.import_module("mooncake.engine").TransferEngine
    except ImportError as error:
        hint = "install mooncake-transfer-engine"
        if "ibverbs" in str(error) or "rdmacm" in str(error):
            hint = "install libibverbs1, librdmacm1 and ibverbs-providers, which it needs even for TCP"
        elif "libcuda" in str(error) or "libcudart" in str(error):
            hint = "install the build of mooncake-transfer-engine for this image's CUDA version"
        raise StartupError(f"Mooncake's TransferEngine can't be loaded: {error}; {hint}") from error
