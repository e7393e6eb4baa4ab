"""Whether the process behind a TransferEngine's port runs, asked before Mooncake waits for it under its lock."""

from __future__ import annotations

import socket
import threading

import pytest

from dcp_connector.transfer import runs


def test_a_peer_that_hangs_up_on_silence_runs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(8)

        thread = threading.Thread(target=serve)
        thread.start()
        assert runs(f"127.0.0.1:{server.getsockname()[1]}", 5)
        thread.join()


def test_a_frozen_peer_takes_the_connection_and_does_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        assert not runs(f"127.0.0.1:{frozen.getsockname()[1]}", 0.3)


@pytest.mark.parametrize(
    "segment", ["127.0.0.1:1", "nonsense", "", "[::1]:1", "no.such.host.invalid:1", "127.0.0.1:99999"]
)
def test_what_is_no_peer_does_not_run(segment: str) -> None:
    assert not runs(segment, 0.3)
