"""Ports for servers that tests start: below those that the system gives to clients, and none given out twice."""

import random
import socket
import threading
from contextlib import ExitStack

#: The range that is chosen from. Linux gives clients ports from 32768 on (net.ipv4.ip_local_port_range).
_LOWEST, _END = 21000, 32000

_LOCK = threading.Lock()
#: What this process has given out: a server may take seconds until it listens, and its port looks free meanwhile.
_GIVEN: set[int] = set()


def first_of_free_ports(count: int) -> int:
    """Return the first of successive ports that nobody listens on."""
    # Begun anywhere, so that two processes that choose at the same time are unlikely to choose the same.
    begin = random.randrange(_LOWEST, _END - 2000)
    with _LOCK:
        for first in range(begin, _END - count, count):
            ports = range(first, first + count)
            if _GIVEN.isdisjoint(ports) and _are_free(ports):
                _GIVEN.update(ports)
                return first
    raise AssertionError(f"no {count} successive ports are free")


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    first = first_of_free_ports(count)
    return list(range(first, first + count))


def free_port() -> int:
    """Return a port that nobody listens on."""
    return first_of_free_ports(1)


def _are_free(ports: range) -> bool:
    with ExitStack() as stack:
        try:
            for port in ports:
                stack.enter_context(socket.create_server(("", port)))
        except OSError:
            return False
        return True
