"""The pipe: one write in flight, none behind its end, and the first error is what the caller sees."""

from __future__ import annotations

import threading

import pytest

from dcp_connector.pipe import Pipe, Wire


def fail() -> None:
    raise ConnectionError("the peer is gone")


def test_one_write_is_in_flight_while_the_caller_prepares_the_next() -> None:
    wire, order = Wire(2), []
    begun, go_on = threading.Event(), threading.Event()

    def write(number: int) -> None:
        begun.set()
        assert go_on.wait(10)
        order.append(number)

    with Pipe(wire) as pipe:
        pipe.push(lambda: write(1))
        assert begun.wait(10)
        assert order == []
        go_on.set()
        pipe.push(lambda: write(2))
        assert order[:1] == [1]
    assert order == [1, 2]
    wire.close()


def test_a_failed_write_is_raised_by_the_next_push_or_at_the_end() -> None:
    wire, written = Wire(1), []
    with Pipe(wire) as pipe:
        pipe.push(fail)
        with pytest.raises(ConnectionError):
            pipe.push(lambda: written.append(2))
    with pytest.raises(ConnectionError), Pipe(wire) as pipe:
        pipe.push(fail)
    wire.close()
    assert written == []


def test_a_failed_write_is_not_hidden_by_what_the_caller_raises() -> None:
    wire = Wire(1)

    def stop() -> None:
        with Pipe(wire) as pipe:
            pipe.push(fail)
            raise ValueError("halted")

    with pytest.raises(ConnectionError):
        stop()
    wire.close()


def test_the_write_in_flight_is_waited_for_when_the_caller_raises() -> None:
    wire, begun, go_on, written = Wire(1), threading.Event(), threading.Event(), []

    def write() -> None:
        begun.set()
        assert go_on.wait(10)
        written.append(1)

    def stop() -> None:
        with Pipe(wire) as pipe:
            pipe.push(write)
            assert begun.wait(10)
            go_on.set()
            raise ValueError("halted")

    with pytest.raises(ValueError, match="halted"):
        stop()
    assert written == [1]
    wire.close()
