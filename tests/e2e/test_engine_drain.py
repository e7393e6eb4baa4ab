"""The preStop hook beside real engines: prefill stays until decode has its KV, decode until its request has ended."""

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from devcluster.completions import complete, get_text
from devcluster.engine import ensure_engine_environment
from devcluster.paths import CHECKOUT, this_cache
from tests.support.engines import EnginePool, EngineSpec, RunningEngine
from tests.support.pd_pair import PDPair, eventually, metric

ASK = {"do_remote_decode": True, "do_remote_prefill": False}
#: As the operator renders it: the engine ends its own requests too when it is told to stop.
DRAINS = ("--shutdown-timeout=60",)
PREFILL = EngineSpec(tensor=1, role="kv_producer", args=DRAINS)
DECODE = EngineSpec(tensor=2, dcp=2, interleave=8, role="kv_consumer", args=DRAINS)
PROMPT = "An engine that goes keeps what it owes. " * 4


@pytest.fixture
def pair(engine_pool: EnginePool) -> Iterator[PDPair]:
    yield PDPair(*engine_pool.get(PREFILL, DECODE))
    # The test ended prefill.
    engine_pool.stop(PREFILL)


@contextmanager
def hook(
    engine: RunningEngine, log: Path, *, requests_s: int = 120, kv_s: int = 120
) -> Iterator[subprocess.Popen[bytes]]:
    """The hook with the interpreter of the engines, as the operator renders it but for the first wait."""
    python = ensure_engine_environment(this_cache().root, print) / "bin" / "python3"
    port = engine.url.rpartition(":")[2]
    command = [str(python), "-m", "dcp_connector.drain", f"--port={port}", "--settle=0", f"--log={log}"]
    variables = {"PYTHONPATH": str(CHECKOUT / "connector")}
    process = subprocess.Popen([*command, f"--requests={requests_s}", f"--kv={kv_s}"], env=variables)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def said(log: Path, words: str) -> bool:
    return log.exists() and words in log.read_text()


def test_an_engine_stays_until_nobody_needs_it_and_decode_gets_its_tokens(pair: PDPair, tmp_path: Path) -> None:
    expected = complete(pair.prefill.url, PROMPT).token_ids
    offered = complete(pair.prefill.url, PROMPT, max_tokens=1, kv_transfer_params=ASK).kv_transfer_params
    eventually(lambda: metric(pair.prefill, "pinned_requests", suffix="") == 1)
    log = tmp_path / "prefill.log"
    with hook(pair.prefill, log) as process:
        eventually(lambda: said(log, "requests running or waiting: 0, requests whose KV is held: 1"))
        with hook(pair.prefill, tmp_path / "other.log", requests_s=0, kv_s=3) as impatient:
            # Several looks, at each of which the other one could end.
            assert impatient.wait(60) == 0
        assert said(tmp_path / "other.log", "the time is over; ")
        assert process.poll() is None
        before = metric(pair.decode, "tokens_received")
        answer = complete(pair.decode.url, PROMPT, kv_transfer_params=offered)
        assert process.wait(60) == 0
    assert answer.token_ids == expected
    eventually(lambda: metric(pair.decode, "tokens_received") > before)
    assert log.read_text().rstrip().endswith("no request runs and no KV is held")

    # What kubelet does next. Nothing is left to drain, so it takes no time.
    pair.prefill.group.process.terminate()
    assert pair.prefill.group.process.wait(45) == 0
    assert get_text(pair.decode.url, "/health") == ""
    assert complete(pair.decode.url, PROMPT).token_ids == expected, "decode goes on, without prefill too"

    log = tmp_path / "decode.log"
    with ThreadPoolExecutor(1) as pool, hook(pair.decode, log) as process:
        running = pool.submit(complete, pair.decode.url, PROMPT, max_tokens=600)
        eventually(lambda: said(log, "requests running or waiting: 1, requests whose KV is held: 0"))
        assert process.poll() is None
        assert len(running.result().token_ids) == 600
        assert process.wait(60) == 0
    assert said(log, "no request runs and no KV is held")
