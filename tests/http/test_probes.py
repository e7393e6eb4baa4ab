"""What an address tells of the process behind it: only a refusal says that it has ended."""

from __future__ import annotations

import socket

import pytest

from dcp_connector.sockets import is_refused, open_listener
from tests.support.operator_process import wait_for


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_address_refuses_once_its_process_has_closed_it(host: str) -> None:
    if host == "::1" and not socket.has_ipv6:
        host = "127.0.0.1"
    listener, address = open_listener(host)
    assert not is_refused(address)
    listener.close()
    # ZeroMQ closes in a thread of its own.
    wait_for(f"{address} takes no connections any more", lambda: is_refused(address), 10, every_s=0.002)


def test_a_process_that_takes_connections_and_says_nothing_has_not_ended() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as frozen:
        address = f"tcp://127.0.0.1:{frozen.getsockname()[1]}"
        waiting = []
        for _ in range(4):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(frozen.getsockname())
            waiting.append(sock)
        assert not is_refused(address, timeout_s=0.3), "its queue of connections is full, it has not ended"
        for sock in waiting:
            sock.close()


@pytest.mark.parametrize("address", ["tcp://", "tcp://127.0.0.1", "nonsense", "tcp://no.such.host.invalid:1"])
def test_what_is_no_address_says_nothing(address: str) -> None:
    assert not is_refused(address, timeout_s=0.3)
