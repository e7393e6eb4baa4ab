"""The preStop hook as a process beside a server that answers as vLLM does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dcp_connector.httpd import Answer, HttpServer, text

CONNECTOR = Path(__file__).parents[2] / "connector"
HOST = "127.0.0.1"


class Engine:
    """An engine's /metrics with numbers that a test changes."""

    def __init__(self) -> None:
        self.running, self.held = 0, 0
        self.server = HttpServer(HOST, 0, self._respond, "engine")

    def _respond(self, path: str) -> Answer:
        if path != "/metrics":
            return text(404, "nothing here")
        labels = '{engine="0",model_name="chat"}'
        lines = [
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{labels} {self.running}.0",
            f"vllm:num_requests_waiting{labels} 0.0",
            f"vllm:dcp_kv_pinned_requests{labels} {self.held}.0",
        ]
        return 200, {"Content-Type": "text/plain; version=0.0.4"}, "\n".join(lines).encode()


@pytest.fixture
def engine() -> Iterator[Engine]:
    found = Engine()
    yield found
    found.server.close()


@contextmanager
def hook(port: int, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """The hook as kubelet starts it: nothing but the connector's folder to import from."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dcp_connector.drain", f"--port={port}", *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(CONNECTOR), **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_line(log: Path, words: str) -> None:
    deadline = time.monotonic() + 30
    while not (log.exists() and words in log.read_text()):
        assert time.monotonic() < deadline, f"not said: {words}; but: {log.exists() and log.read_text()}"
        time.sleep(0.05)


def test_it_waits_for_requests_and_then_for_kv_and_ends_well(engine: Engine, tmp_path: Path) -> None:
    log = tmp_path / "log"
    engine.running = 1
    with hook(engine.server.port, "--settle=0", "--requests=600", "--kv=600", f"--log={log}") as process:
        wait_for_line(log, "requests running or waiting: 1, requests whose KV is held: 0")
        engine.running, engine.held = 0, 2
        wait_for_line(log, "requests running or waiting: 0, requests whose KV is held: 2")
        assert process.poll() is None
        engine.held = 0
        assert process.wait(30) == 0
    lines = log.read_text().splitlines()
    assert len(lines) == 4
    assert all(line.startswith("dcp drain: ") for line in lines)
    assert lines[-1].endswith("no request runs and no KV is held")


def test_it_ends_at_the_deadline_whatever_is_left(engine: Engine, tmp_path: Path) -> None:
    engine.running, engine.held = 1, 1
    with hook(engine.server.port, "--settle=0", "--requests=1", "--kv=1", f"--log={tmp_path / 'log'}") as process:
        assert process.wait(30) == 0
    assert "the time is over" in (tmp_path / "log").read_text()


def test_it_ends_when_the_engine_has_ended(engine: Engine, tmp_path: Path) -> None:
    log = tmp_path / "log"
    engine.held = 1
    with hook(engine.server.port, "--requests=600", "--kv=600", f"--log={log}") as process:
        wait_for_line(log, "KV is held: 1")
        engine.server.close()
        assert process.wait(30) == 0
    assert "nothing listens on the engine's port, so there is nothing to wait for" in log.read_text()


def test_a_pod_with_part_of_an_engine_asks_the_host_that_a_variable_names(engine: Engine, tmp_path: Path) -> None:
    limits = ["--settle=0", "--requests=9", "--kv=9", f"--log={tmp_path / 'log'}"]
    with hook(engine.server.port, *limits, "--host-variable=LEADER", LEADER="localhost") as process:
        assert process.wait(30) == 0
    assert "no request runs and no KV is held" in (tmp_path / "log").read_text()
    with hook(engine.server.port, *limits, "--host-variable=LEADER", LEADER="127.0.0.2") as process:
        assert process.wait(30) == 0
    assert "nothing listens" in (tmp_path / "log").read_text()


def test_where_the_containers_log_is_not_its_own_it_says_it_itself(engine: Engine, tmp_path: Path) -> None:
    with hook(engine.server.port, "--settle=0", "--requests=1", "--kv=1", f"--log={tmp_path}") as process:
        said, _ = process.communicate(timeout=30)
    assert said.splitlines()[-1].endswith("no request runs and no KV is held")
