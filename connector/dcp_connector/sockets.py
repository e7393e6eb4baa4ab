"""ZeroMQ sockets of the control channel, with the options that both ends share."""

import socket
import sys
import time
from urllib.parse import urlsplit

import zmq

from dcp_connector.wire import MAX_FRAME_BYTES

Socket = zmq.Socket[bytes]

#: Messages of one peer that wait on a prefill rank; more stay with the peer.
_LISTENER_QUEUE = 64
#: A frozen or unreachable host breaks the connection after this, instead of at the request's deadline.
_HEARTBEAT_MS = 5_000
_HEARTBEAT_TIMEOUT_MS = 15_000


def open_listener(host: str) -> tuple[Socket, str]:
    """Return a ROUTER on a random port of `host`, and its "tcp://host:port". Raises zmq.ZMQError."""
    sock = _open(zmq.ROUTER, host)
    # A decode rank that reconnects takes its old identity over, so that answers still reach it.
    sock.setsockopt(zmq.ROUTER_HANDOVER, 1)
    sock.setsockopt(zmq.RCVHWM, _LISTENER_QUEUE)
    shown = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
    try:
        return sock, f"{shown}:{sock.bind_to_random_port(shown)}"
    except zmq.ZMQError:
        sock.close()
        raise


def is_refused(address: str, timeout_s: float = 2.0) -> bool:
    """Tell whether "tcp://host:port" refuses connections: its host lives, and the process that listened has ended.

    A frozen process doesn't refuse, nor does a host that can't be reached: what became of those is unknown. Waits.
    """
    try:
        parts = urlsplit(address)
        if parts.hostname and parts.port:
            socket.create_connection((parts.hostname, parts.port), timeout_s).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False
    return False


class Line:
    """The connection to one prefill rank: a DEALER that reconnects by itself, and a monitor that tells when it broke.

    `lost_at` is for the owner: when the connection broke, None while it stands. Raises zmq.ZMQError for an address that
    isn't one.
    """

    def __init__(self, address: str, identity: bytes) -> None:
        self.socket = _open(zmq.DEALER, address)
        self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.setsockopt(zmq.CONNECT_TIMEOUT, 5_000)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 200)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        lost = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        self.monitor = self.socket.get_monitor_socket(lost | zmq.EVENT_CONNECTED)
        self.lost_at: float | None = None
        try:
            self.socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise

    def observe(self) -> bool:
        """Take one event off the monitor, keep `lost_at`, and return whether the connection is broken."""
        # The first part of an event is its number (16 bits) and value (32 bits), both in the machine's byte order.
        event = zmq.Event(int.from_bytes(self.monitor.recv_multipart(zmq.NOBLOCK)[0][:2], sys.byteorder))
        if event == zmq.EVENT_CONNECTED:
            self.lost_at = None
        elif self.lost_at is None:
            self.lost_at = time.monotonic()
        return self.lost_at is not None

    def close(self) -> None:
        """Hang up."""
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()


def _open(kind: int, address: str) -> Socket:
    context = zmq.Context[Socket].instance()
    sock = context.socket(kind)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    sock.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    # In ZeroMQ an IPv6 socket also speaks IPv4, but not on every host; so only where it is needed.
    sock.setsockopt(zmq.IPV6, int(address.removeprefix("tcp://").count(":") > 1))
    return sock
