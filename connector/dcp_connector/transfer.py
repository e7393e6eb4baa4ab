"""The only importer of mooncake: memory that is registered, and batches of writes into a peer's memory."""

from __future__ import annotations

import importlib
import os
import time
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dcp_connector.errors import ConnectorError, StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        """Write one batch and wait for it. Raises TransferError."""
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
        """Write one batch and wait for it. Raises TransferError; then any part of it may be written, now or later."""
        started = time.monotonic()
        code = self._engine.batch_transfer_sync_write(segment, src, dst, length)
        if code != 0:
            took = time.monotonic() - started
            raise TransferError(
                f"a batch of {len(length)} descriptors, {sum(length)} bytes to {segment} failed after {took:.1f} s "
                f"(code {code}); Mooncake's own log on stderr says why"
            )


def _load(protocol: str) -> Any:
    """Import mooncake's engine with its limits raised. Raises StartupError in one sentence."""
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
