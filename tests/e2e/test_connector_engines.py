"""The connector in real vLLM engines on this machine: both router flows, and what routers and clients get wrong.

Prefill TP 1, decode TP 2 with DCP 2 and interleave 8. Tokens are compared with prefill's own answer to the same prompt.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from devcluster.completions import CompletionError, complete, complete_serially, get_text
from tests.support.engines import EnginePool, EngineSpec, RunningEngine

pytestmark = pytest.mark.timeout(900)

# Times are far above what a transfer takes: machines of this kind were seen to stand still for five seconds under load.
PREFILL = EngineSpec(role="kv_producer", connector=(("lease_s", 30.0),))
DECODE = EngineSpec(
    tensor=2,
    dcp=2,
    interleave=8,
    role="kv_consumer",
    load_failure_policy="recompute",
    connector=(("request_timeout_s", 20.0), ("cancel_grace_s", 1.0)),
)
#: 4 layers, one KV head of 32 values for K and 32 for V, float32.
BYTES_PER_TOKEN = 4 * 64 * 4
PROMPTS = [("The quick brown fox jumps. " * 30)[:length] + str(length) for length in (1, 6, 15, 31, 62, 64, 200, 400)]


@dataclass(frozen=True)
class Line:
    prefill: RunningEngine
    decode: RunningEngine

    @property
    def engine_id(self) -> str:
        query = json.loads(get_text(str(self.prefill.bootstrap_url), "/query"))
        assert set(query) == {"0"}
        return str(query["0"]["engine_id"])

    def to_decode(self, transfer_id: str, **changes: Any) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_bootstrap_addr": self.prefill.bootstrap_url,
            "remote_engine_id": self.engine_id,
            "transfer_id": transfer_id,
            **changes,
        }

    def concurrently(self, prompt: str) -> tuple[int, ...]:
        """What vLLM's example proxy and llm-d's sidecar do: ask both engines at once."""
        transfer_id = f"xfer-{uuid.uuid4()}"
        ask = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        with ThreadPoolExecutor(1) as pool:
            prefilled = pool.submit(complete, self.prefill.url, prompt, max_tokens=1, kv_transfer_params=ask)
            decoded = complete(self.decode.url, prompt, kv_transfer_params=self.to_decode(transfer_id))
            prefilled.result()
        return decoded.token_ids

    def still_works(self) -> None:
        """A fresh prompt gets the right tokens, its KV came from prefill, and nothing is left pinned."""
        prompt = f"fresh {uuid.uuid4()} " * 5
        before = metric(self.decode, "tokens_received")
        answer = complete_serially(self.prefill.url, self.decode.url, prompt)
        assert answer.token_ids == complete(self.prefill.url, prompt).token_ids
        eventually(lambda: metric(self.decode, "tokens_received") > before)
        eventually(lambda: metric(self.prefill, "pinned_requests", suffix="") == 0)


@pytest.fixture(scope="module")
def pd(engine_pool: EnginePool) -> Iterator[Line]:
    prefill, decode = engine_pool.get(PREFILL, DECODE)
    yield Line(prefill, decode)
    engine_pool.stop(PREFILL, DECODE)


def metric(engine: RunningEngine, name: str, label: str = "", suffix: str = "_total") -> float:
    """The value of a metric of the connector, summed over what `label` doesn't fix."""
    pattern = re.compile(rf"^vllm:dcp_kv_{name}{suffix}\{{(.*)\}} (\S+)$", re.MULTILINE)
    found = [float(m[2]) for m in pattern.finditer(get_text(engine.url, "/metrics")) if label in m[1]]
    assert found, f"{name} is not on /metrics"
    return sum(found)


def eventually(condition: Any, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.1)


def test_both_flows_give_the_tokens_of_one_engine_and_the_counters_agree(pd: Line) -> None:
    expected = {prompt: complete(pd.prefill.url, prompt).token_ids for prompt in PROMPTS}
    before = [metric(pd.prefill, "bytes_sent"), metric(pd.decode, "bytes_received")]
    for prompt in PROMPTS:
        assert complete_serially(pd.prefill.url, pd.decode.url, prompt).token_ids == expected[prompt], prompt[-5:]
    with ThreadPoolExecutor(4) as pool:
        turned = [f"{prompt[::-1]}{prompt}" for prompt in PROMPTS[:6]]
        answers = list(pool.map(pd.concurrently, turned))
    assert answers == [complete(pd.prefill.url, prompt).token_ids for prompt in turned]
    eventually(lambda: metric(pd.prefill, "pinned_requests", suffix="") == 0)
    sent, received = metric(pd.prefill, "bytes_sent") - before[0], metric(pd.decode, "bytes_received") - before[1]
    assert sent == received > 0
    assert received % BYTES_PER_TOKEN == 0
    assert metric(pd.decode, "failed_transfers") == 0


def test_query_and_topology_are_served_and_ready_follows_the_engine(pd: Line) -> None:
    query = json.loads(get_text(str(pd.prefill.bootstrap_url), "/query"))
    assert query == {"0": {"engine_id": pd.engine_id, "worker_addr": {"0": {"0": query["0"]["worker_addr"]["0"]["0"]}}}}
    assert query["0"]["worker_addr"]["0"]["0"].startswith("tcp://127.0.0.1:")
    topology = json.loads(get_text(str(pd.decode.bootstrap_url), "/v1/topology"))
    assert topology["side"]["layout"] == [2, 2, 8, 32, 1]
    assert topology["side"]["page_format"] == "rows"
    for engine in (pd.prefill, pd.decode):
        assert get_text(str(engine.bootstrap_url), "/readyz") == "ready\n"


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": "yes"},
        {"do_remote_prefill": True, "transfer_id": 7, "remote_bootstrap_addr": ["x"]},
        {"do_remote_prefill": True, "transfer_id": "x" * 5000, "remote_bootstrap_addr": "http://127.0.0.1:1"},
        {"do_remote_prefill": True, "transfer_id": "x", "remote_bootstrap_addr": "file:///etc/passwd"},
        {"do_remote_prefill": True, "do_remote_decode": True, "transfer_id": "x"},
        {"do_remote_decode": True, "transfer_id": "decode is no producer"},
    ],
)
def test_malformed_parameters_become_a_local_prefill_and_are_counted(pd: Line, params: dict[str, Any]) -> None:
    before = metric(pd.decode, "failed_transfers", 'reason="params_malformed"')
    expected = complete(pd.prefill.url, "malformed parameters").token_ids
    assert complete(pd.decode.url, "malformed parameters", kv_transfer_params=params).token_ids == expected
    eventually(lambda: metric(pd.decode, "failed_transfers", 'reason="params_malformed"') == before + 1)


def test_parameters_that_are_missing_are_counted(pd: Line) -> None:
    before = metric(pd.decode, "failed_transfers", 'reason="params_missing"')
    complete(pd.decode.url, "no parameters")
    eventually(lambda: metric(pd.decode, "failed_transfers", 'reason="params_missing"') == before + 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"remote_engine_id": "of an earlier process"}, "stale_engine_id"),
        ({"remote_bootstrap_addr": "http://127.0.0.1:1"}, "bootstrap_unreachable"),
        ({}, "deadline"),
    ],
)
def test_a_load_that_fails_is_recomputed_by_policy_with_the_right_tokens(
    pd: Line, changes: dict[str, Any], reason: str
) -> None:
    prompt = f"a load that fails: {reason} " * 4
    before = metric(pd.decode, "failed_transfers", f'reason="{reason}"')
    params = pd.to_decode(f"never-{uuid.uuid4()}", **changes)
    started = time.monotonic()
    answer = complete(pd.decode.url, prompt, kv_transfer_params=params)
    assert time.monotonic() - started < 45
    assert answer.token_ids == complete(pd.prefill.url, prompt).token_ids
    eventually(lambda: metric(pd.decode, "failed_transfers", f'reason="{reason}"') == before + 1)
    # What failed never entered the prefix cache: the same prompt again is right.
    assert complete_serially(pd.prefill.url, pd.decode.url, prompt).token_ids == answer.token_ids


def test_a_transfer_id_that_is_used_twice_never_yields_the_other_prompts_answer(pd: Line) -> None:
    transfer_id = f"twice-{uuid.uuid4()}"
    ask = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    first, second = "the first prompt under this id " * 4, "and the second, different one! " * 4
    complete(pd.prefill.url, first, max_tokens=1, kv_transfer_params=ask)
    refused = complete(pd.prefill.url, second, max_tokens=1, kv_transfer_params=ask)
    assert refused.kv_transfer_params is None
    answer = complete(pd.decode.url, second, kv_transfer_params=pd.to_decode(transfer_id))
    assert answer.token_ids == complete(pd.prefill.url, second).token_ids
    assert complete(pd.decode.url, first, kv_transfer_params=pd.to_decode(transfer_id)).token_ids == (
        complete(pd.prefill.url, first).token_ids
    )


def test_a_client_that_leaves_decode_while_it_waits_frees_both_sides(pd: Line) -> None:
    transfer_id = f"gone-{uuid.uuid4()}"
    prompt = "a client that leaves " * 10
    hang_up(pd.decode, prompt, pd.to_decode(transfer_id), after_s=1.0)
    ask = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    complete(pd.prefill.url, prompt, max_tokens=1, kv_transfer_params=ask)
    eventually(lambda: metric(pd.prefill, "pinned_requests", suffix="") == 0)
    pd.still_works()


def test_a_client_that_leaves_prefill_ends_the_waiting_decode_request_at_once(pd: Line) -> None:
    transfer_id = f"aborted-{uuid.uuid4()}"
    prompt = "prefill is aborted " * 30
    ask = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    before = metric(pd.decode, "failed_transfers", 'reason="prefill_aborted"')
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(complete, pd.decode.url, prompt, kv_transfer_params=pd.to_decode(transfer_id))
        time.sleep(0.5)
        hang_up(pd.prefill, prompt, ask, after_s=0.3, max_tokens=1400)
        answer = waiting.result()
    eventually(lambda: metric(pd.decode, "failed_transfers", 'reason="prefill_aborted"') == before + 1)
    assert answer.token_ids == complete(pd.prefill.url, prompt).token_ids
    pd.still_works()


def test_a_prompt_that_nobody_asks_for_is_given_back_after_the_lease(pd: Line) -> None:
    before = metric(pd.prefill, "failed_transfers", 'reason="lease_expired"')
    ask = {"do_remote_decode": True, "do_remote_prefill": False}
    complete(pd.prefill.url, "nobody asks for this", max_tokens=1, kv_transfer_params=ask)
    eventually(lambda: metric(pd.prefill, "pinned_requests", suffix="") == 1)
    eventually(lambda: metric(pd.prefill, "pinned_requests", suffix="") == 0, 60)
    assert metric(pd.prefill, "failed_transfers", 'reason="lease_expired"') == before + 1


def test_noise_on_every_port_kills_nobody(pd: Line) -> None:
    query = json.loads(get_text(str(pd.prefill.bootstrap_url), "/query"))
    control = query["0"]["worker_addr"]["0"]["0"].removeprefix("tcp://")
    for address in (control, *(str(e.bootstrap_url).removeprefix("http://") for e in (pd.prefill, pd.decode))):
        host, port = address.split(":")
        for _ in range(5):
            with socket.create_connection((host, int(port))) as sock:
                sock.sendall(uuid.uuid4().bytes * 200)
    pd.still_works()


def test_prefill_that_is_killed_while_decode_waits_ends_the_request_by_policy(
    pd: Line, engine_pool: EnginePool
) -> None:
    """The last test that needs this prefill engine: it kills it."""
    pd.still_works()
    prompt = "prefill dies " * 20
    expected = complete(pd.prefill.url, prompt).token_ids
    params = pd.to_decode(f"dies-{uuid.uuid4()}")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(complete, pd.decode.url, prompt, kv_transfer_params=params)
        time.sleep(1.0)
        killed = time.monotonic()
        pd.prefill.group.signal(signal.SIGKILL)
        answer = waiting.result()
    assert answer.token_ids == expected
    assert time.monotonic() - killed < 40
    engine_pool.stop(PREFILL)
    eventually(lambda: metric(pd.decode, "failed_transfers", 'reason="peer_lost"') == 1)
    assert complete(pd.decode.url, "decode goes on").token_ids


def hang_up(engine: RunningEngine, prompt: str, params: dict[str, Any], after_s: float, max_tokens: int = 24) -> None:
    """Send a completion request and close the connection without waiting for the answer."""
    body = json.dumps(
        {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "kv_transfer_params": params}
    )
    host, port = engine.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        threading.Event().wait(after_s)


def test_a_load_that_fails_is_an_error_by_policy_and_the_engine_lives(engine_pool: EnginePool) -> None:
    (decode,) = engine_pool.get(
        EngineSpec(tensor=2, dcp=2, interleave=8, role="kv_consumer", load_failure_policy="fail")
    )
    params = {
        "do_remote_prefill": True,
        "remote_bootstrap_addr": "http://127.0.0.1:1",
        "remote_engine_id": "gone",
        "transfer_id": "nobody",
    }
    for _ in range(2):
        with pytest.raises(CompletionError, match="answered 5"):
            complete(decode.url, "a load that fails " * 10, kv_transfer_params=params)
    assert len(complete(decode.url, "a load that fails " * 10).token_ids) == 24
    eventually(lambda: metric(decode, "failed_transfers", 'reason="bootstrap_unreachable"') == 2)
