"""The connector in real vLLM engines on this machine: both router flows, and what routers and clients get wrong.

Prefill TP 1, decode TP 2 with DCP 2 and interleave 8, once with each policy for a load that fails. After a fault tokens
are compared with those of an engine without P/D, else with prefill's own answer to the same prompt.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from devcluster.completions import CompletionError, complete, complete_serially, get_text
from devcluster.metrics import total
from tests.support.engines import EnginePool, EngineSpec, RunningEngine
from tests.support.pd_pair import PDPair, eventually, metric, settled, step, writes_by_path
from tests.support.silenced import silenced

pytestmark = pytest.mark.timeout(900)

# Times are far above what a transfer takes: machines of this kind were seen to stand still for five seconds under load.
LEASE_S = 30.0
TIMEOUT_S, GRACE_S = 20.0, 1.0
#: What comes on top of deadline and grace: two such pauses. Measured on two cores at a load of 8: less than 3 s.
SLACK_S = 10.0
#: Small, so that a long prompt doesn't fit in at once.
STAGING = ("staging_bytes", 1 << 20)
PREFILL = EngineSpec(role="kv_producer", connector=(("lease_s", LEASE_S), ("path", "scatter"), STAGING))
DECODE = EngineSpec(
    tensor=2,
    dcp=2,
    interleave=8,
    role="kv_consumer",
    load_failure_policy="recompute",
    connector=(("request_timeout_s", TIMEOUT_S), ("cancel_grace_s", GRACE_S), STAGING),
)
FAILING_TIMEOUT_S = 10.0
FAILING = replace(DECODE, load_failure_policy="fail", connector=(("request_timeout_s", FAILING_TIMEOUT_S), STAGING))
PLAIN = EngineSpec()
#: Tokens of a virtual block of decode: its rank's block times DCP.
VIRTUAL_BLOCK = 64
END_OF_SEQUENCE = 257
#: 4 layers, one KV head of 32 values for K and 32 for V, float32.
BYTES_PER_TOKEN = 4 * 64 * 4
PROMPTS = [("The quick brown fox jumps. " * 30)[:length] + str(length) for length in (1, 6, 15, 31, 62, 64, 200, 400)]


@pytest.fixture(scope="module")
def pairs(engine_pool: EnginePool) -> Iterator[dict[str, PDPair]]:
    """The prefill engine with the decode engine of each policy."""
    prefill, recomputing, failing, _ = engine_pool.get(PREFILL, DECODE, FAILING, PLAIN)
    yield {"recompute": PDPair(prefill, recomputing), "fail": PDPair(prefill, failing)}
    engine_pool.stop(PREFILL, DECODE, FAILING, PLAIN)


@pytest.fixture(scope="module")
def pd(pairs: dict[str, PDPair]) -> PDPair:
    return pairs["recompute"]


@pytest.fixture(scope="module")
def plain(pairs: dict[str, PDPair], engine_pool: EnginePool) -> Callable[[str], tuple[int, ...]]:
    """The tokens of an engine that knows nothing of P/D; it runs beside the pairs."""
    return lambda prompt: engine_pool.answers(PLAIN, [prompt])[0]


def test_both_flows_give_the_tokens_of_one_engine_and_the_counters_agree(pd: PDPair) -> None:
    expected = {prompt: complete(pd.prefill.url, prompt).token_ids for prompt in PROMPTS}
    before = [metric(pd.prefill, "bytes_sent"), metric(pd.decode, "bytes_received")]
    for prompt in PROMPTS:
        assert complete_serially(pd.prefill.url, pd.decode.url, prompt).token_ids == expected[prompt], prompt[-5:]
    with ThreadPoolExecutor(4) as pool:
        turned = [f"{prompt[::-1]}{prompt}" for prompt in PROMPTS[:6]]
        answers = [answer.token_ids for answer in pool.map(pd.concurrently, turned)]
    assert answers == [complete(pd.prefill.url, prompt).token_ids for prompt in turned]
    pd.settled()
    sent, received = metric(pd.prefill, "bytes_sent") - before[0], metric(pd.decode, "bytes_received") - before[1]
    assert sent == received > 0
    assert received % BYTES_PER_TOKEN == 0
    assert metric(pd.decode, "failed_transfers") == metric(pd.decode, "tokens_recomputed") == 0
    assert metric(pd.prefill, "write_seconds", suffix="_count") > 0
    assert metric(pd.decode, "receive_seconds", suffix="_count") > 0
    assert {path for path, count in writes_by_path(pd.prefill).items() if count} == {"scatter"}


def test_query_and_topology_are_served_and_ready_follows_the_engine(pd: PDPair) -> None:
    query = json.loads(get_text(str(pd.prefill.bootstrap_url), "/query"))
    assert query == {"0": {"engine_id": pd.engine_id, "worker_addr": {"0": {"0": query["0"]["worker_addr"]["0"]["0"]}}}}
    assert query["0"]["worker_addr"]["0"]["0"].startswith("tcp://127.0.0.1:")
    topology = json.loads(get_text(str(pd.decode.bootstrap_url), "/v1/topology"))
    assert topology["side"]["layout"] == [2, 2, 8, 32, 1]
    assert topology["side"]["page_format"] == "rows"
    for engine in (pd.prefill, pd.decode):
        assert get_text(str(engine.bootstrap_url), "/readyz") == "ready\n"
        assert get_text(str(engine.bootstrap_url), "/healthz") == "ok\n"


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
def test_malformed_parameters_become_a_local_prefill_and_are_counted(pd: PDPair, params: dict[str, Any]) -> None:
    before = metric(pd.decode, "failed_transfers", 'reason="params_malformed"')
    expected = complete(pd.prefill.url, "malformed parameters").token_ids
    assert complete(pd.decode.url, "malformed parameters", kv_transfer_params=params).token_ids == expected
    eventually(lambda: metric(pd.decode, "failed_transfers", 'reason="params_malformed"') == before + 1)


def test_parameters_that_are_missing_are_counted(pd: PDPair) -> None:
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
    pd: PDPair, plain: Callable[[str], tuple[int, ...]], changes: dict[str, Any], reason: str
) -> None:
    prompt = f"a load that fails: {reason} " * 4
    expected = plain(prompt)
    before = metric(pd.decode, "failed_transfers", f'reason="{reason}"')
    params = pd.to_decode(f"never-{uuid.uuid4()}", **changes)
    started = time.monotonic()
    answer = complete(pd.decode.url, prompt, kv_transfer_params=params)
    took = time.monotonic() - started
    if reason == "deadline":
        assert TIMEOUT_S <= took < TIMEOUT_S + GRACE_S + SLACK_S
    else:
        assert took < SLACK_S, "there is nothing to wait for"
    assert answer.token_ids == expected
    eventually(lambda: metric(pd.decode, "failed_transfers", f'reason="{reason}"') == before + 1)
    pd.still_works(prompt, expected)


def test_a_transfer_id_that_is_used_twice_never_yields_the_other_prompts_answer(pd: PDPair) -> None:
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


def test_a_client_that_leaves_decode_while_it_waits_frees_both_sides(
    pd: PDPair, plain: Callable[[str], tuple[int, ...]]
) -> None:
    transfer_id = f"gone-{uuid.uuid4()}"
    prompt = "a client that leaves " * 10
    hang_up(pd.decode, prompt, pd.to_decode(transfer_id), after_s=1.0)
    ask = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    complete(pd.prefill.url, prompt, max_tokens=1, kv_transfer_params=ask)
    pd.settled()
    pd.still_works(prompt, plain(prompt))


def test_a_client_that_leaves_prefill_ends_the_waiting_decode_request_at_once(
    pd: PDPair, plain: Callable[[str], tuple[int, ...]]
) -> None:
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
    assert answer.token_ids == plain(prompt)
    pd.still_works(prompt, plain(prompt))


def test_a_client_that_leaves_after_the_transfer_frees_both_sides(
    pd: PDPair, plain: Callable[[str], tuple[int, ...]]
) -> None:
    prompt = f"gone while it is answered {uuid.uuid4()} " * 5
    ask = {"do_remote_decode": True, "do_remote_prefill": False}
    params = complete(pd.prefill.url, prompt, max_tokens=1, kv_transfer_params=ask).kv_transfer_params
    assert params
    before = metric(pd.decode, "tokens_received")
    with hanging(pd.decode, prompt, dict(params), max_tokens=1400):
        eventually(lambda: metric(pd.decode, "tokens_received") > before)
        eventually(lambda: total(get_text(pd.decode.url, "/metrics"), "vllm:num_requests_running") == 1)
    pd.still_works(prompt, plain(prompt))
    # vLLM reports its gauges with a step, so only now.
    for engine in (pd.prefill, pd.decode):
        eventually(lambda engine=engine: total(get_text(engine.url, "/metrics"), "vllm:num_requests_running") == 0)
        eventually(lambda engine=engine: total(get_text(engine.url, "/metrics"), "vllm:kv_cache_usage_perc") == 0)


def test_twenty_prompts_that_nobody_asks_for_hold_up_nobody_and_are_given_back_after_the_lease(pd: PDPair) -> None:
    before = metric(pd.prefill, "failed_transfers", 'reason="lease_expired"')
    ask = {"do_remote_decode": True, "do_remote_prefill": False}
    started = time.monotonic()
    for number in range(20):
        complete(pd.prefill.url, f"nobody asks for {number} of these", max_tokens=1, kv_transfer_params=ask)
    prompt = f"somebody asks for this {uuid.uuid4()} " * 5
    assert pd.serially(prompt).token_ids == complete(pd.prefill.url, prompt).token_ids
    if time.monotonic() - started < LEASE_S / 2:  # not on a machine that stood still meanwhile
        assert metric(pd.prefill, "pinned_requests", suffix="") >= 20
    eventually(lambda: metric(pd.prefill, "pinned_requests", suffix="") == 0, 2 * LEASE_S)
    assert metric(pd.prefill, "failed_transfers", 'reason="lease_expired"') == before + 20


@pytest.mark.parametrize("length", [31, 63, 64, 65, 128])
def test_a_router_that_appends_prefills_token_to_the_prompt_gets_the_tokens_that_follow(
    pd: PDPair, length: int
) -> None:
    """64 tokens are a virtual block of decode: the appended token is the first of a block, or the last."""
    prompt = [ord(character) - ord("!") for character in f"{uuid.uuid4()}" * 4][:length]
    expected = complete(pd.prefill.url, prompt).token_ids
    ask = {"do_remote_decode": True, "do_remote_prefill": False}
    before = metric(pd.decode, "tokens_received")
    first = complete(pd.prefill.url, prompt, max_tokens=1, kv_transfer_params=ask)
    assert first.token_ids == expected[:1]
    longer = [*prompt, *first.token_ids]
    answer = complete(pd.decode.url, longer, max_tokens=23, kv_transfer_params=first.kv_transfer_params)
    assert answer.token_ids == expected[1:]
    eventually(lambda: metric(pd.decode, "tokens_received") == before + length)
    pd.settled()


@pytest.mark.parametrize("flow", ["serial", "concurrent"])
def test_a_prompt_whose_first_token_ends_the_answer_is_handed_off_all_the_same(pd: PDPair, flow: str) -> None:
    prompt = f"the end comes at once {uuid.uuid4()}"
    ending = {"logit_bias": {str(END_OF_SEQUENCE): 100}, "ignore_eos": False, "max_tokens": 5}
    before = [metric(pd.decode, "tokens_received"), metric(pd.decode, "failed_transfers")]
    transfer_id = f"ends-{uuid.uuid4()}"
    ask = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    started = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        to_decode = pd.to_decode(transfer_id)
        if flow == "concurrent":
            decoded = pool.submit(complete_raw, pd.decode, prompt, {**ending, "kv_transfer_params": to_decode})
        prefilled = complete_raw(pd.prefill, prompt, {**ending, "max_tokens": 1, "kv_transfer_params": ask})
        if flow == "serial":
            to_decode = prefilled["kv_transfer_params"]
            decoded = pool.submit(complete_raw, pd.decode, prompt, {**ending, "kv_transfer_params": to_decode})
        answer = decoded.result()
    assert time.monotonic() - started < 15, "nobody waited for a deadline"
    for choice in (prefilled["choices"][0], answer["choices"][0]):
        assert (choice["finish_reason"], choice["token_ids"]) == ("stop", [END_OF_SEQUENCE])
    eventually(lambda: metric(pd.decode, "tokens_received") == before[0] + len(prompt))
    assert metric(pd.decode, "failed_transfers") == before[1]
    pd.settled()


def test_noise_on_every_port_kills_nobody(pd: PDPair, plain: Callable[[str], tuple[int, ...]]) -> None:
    query = json.loads(get_text(str(pd.prefill.bootstrap_url), "/query"))
    control = query["0"]["worker_addr"]["0"]["0"].removeprefix("tcp://")
    for address in (control, *(str(e.bootstrap_url).removeprefix("http://") for e in (pd.prefill, pd.decode))):
        host, port = address.split(":")
        for _ in range(5):
            with socket.create_connection((host, int(port))) as sock:
                sock.sendall(uuid.uuid4().bytes * 200)
    prompt = "noise on every port " * 10
    pd.still_works(prompt, plain(prompt))


def test_a_frozen_prefill_engine_holds_up_a_request_only_to_its_deadline_and_its_blocks_until_it_goes_on(
    pd: PDPair, plain: Callable[[str], tuple[int, ...]]
) -> None:
    prompt = "prefill freezes " * 20
    expected = plain(prompt)
    params = pd.to_decode(f"freezes-{uuid.uuid4()}")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(complete, pd.decode.url, prompt, kv_transfer_params=params)
        eventually(lambda: total(get_text(pd.decode.url, "/metrics"), "vllm:num_requests_waiting") == 1)
        pd.prefill.group.signal(signal.SIGSTOP)
        frozen = time.monotonic()
        try:
            # It is computed in other blocks, while those that prefill could write into stay out of use.
            assert waiting.result().token_ids == expected
            assert time.monotonic() - frozen < TIMEOUT_S + GRACE_S + SLACK_S
            assert metric(pd.decode, "quarantined_blocks", suffix="") > 0
        finally:
            pd.prefill.group.signal(signal.SIGCONT)
    settled(pd.prefill, pd.decode, timeout_s=60)
    pd.still_works(prompt, expected)


def health(engine: RunningEngine) -> tuple[int, str]:
    """Status and words of /healthz."""
    connection = http.client.HTTPConnection(urlsplit(str(engine.bootstrap_url)).netloc, timeout=30)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_health_names_a_rank_that_froze_in_an_idle_engine_until_it_goes_on(
    pd: PDPair, plain: Callable[[str], tuple[int, ...]]
) -> None:
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pd.decode.group.members()}
    worker = next(pid for pid, title in titles.items() if b"Worker_TP1" in title)
    os.kill(worker, signal.SIGSTOP)
    try:
        eventually(lambda: health(pd.decode)[0] == 503)
        words = health(pd.decode)[1]
        assert words.startswith("rank tp 1 pp 0: doesn't answer at "), words
        assert words.count("\n") == 1
    finally:
        os.kill(worker, signal.SIGCONT)
    eventually(lambda: health(pd.decode) == (200, "ok\n"))
    prompt = "a rank froze and goes on " * 10
    pd.still_works(prompt, plain(prompt))


def test_a_load_that_fails_is_an_error_by_policy_and_the_engine_lives(
    pairs: dict[str, PDPair], plain: Callable[[str], tuple[int, ...]]
) -> None:
    pd, prompt = pairs["fail"], "a load that fails " * 10
    params = {
        "do_remote_prefill": True,
        "remote_bootstrap_addr": "http://127.0.0.1:1",
        "remote_engine_id": "gone",
        "transfer_id": "nobody",
    }
    before = metric(pd.decode, "failed_transfers", 'reason="bootstrap_unreachable"')
    for _ in range(2):
        with pytest.raises(CompletionError, match="answered 5"):
            complete(pd.decode.url, prompt, kv_transfer_params=params)
    assert complete(pd.decode.url, prompt).token_ids == plain(prompt)
    eventually(lambda: metric(pd.decode, "failed_transfers", 'reason="bootstrap_unreachable"') == before + 2)
    pd.still_works(prompt, plain(prompt))


@pytest.mark.parametrize(
    ("policy", "silent"),
    [("fail", False), ("fail", True), ("recompute", False)],
    ids=["an error", "an error, and prefill doesn't say that it stopped", "recomputed"],
)
def test_a_load_of_which_a_part_was_written_never_enters_the_prefix_cache(
    pairs: dict[str, PDPair], plain: Callable[[str], tuple[int, ...]], policy: str, silent: bool
) -> None:
    """Its first blocks are in decode's cache, as they are good, and stay there; those that it fetched never get in."""
    pd = pairs[policy]
    shared = f"written in part {policy} {silent} {uuid.uuid4()} " * 4
    prompt = (shared + "of many words that do not fit in at once " * 50)[:1900]
    expected = plain(prompt)
    pd.serially(shared)
    cached = len(shared) // VIRTUAL_BLOCK * VIRTUAL_BLOCK
    ask = {"do_remote_decode": True, "do_remote_prefill": False}
    offered = complete(pd.prefill.url, prompt, max_tokens=1, kv_transfer_params=ask).kv_transfer_params or {}
    before = metric(pd.decode, "failed_transfers", 'reason="deadline"')
    unsaid = ("taken", "cancel", "failed", "settled") if silent else ("taken",)
    with silenced(pd.prefill, *unsaid) as (address, silencer):
        params = {**offered, "remote_bootstrap_addr": address}
        if policy == "fail":
            with pytest.raises(CompletionError, match="answered 5"):
                complete(pd.decode.url, prompt, kv_transfer_params=params)
        else:
            assert complete(pd.decode.url, prompt, kv_transfer_params=params).token_ids == expected
        ranks = {rank for kind, rank in silencer.kept if kind == "taken"}
        assert len(ranks) == pd.decode.spec.tensor, "each rank of decode has chunks in its blocks"
        eventually(lambda: metric(pd.decode, "failed_transfers", 'reason="deadline"') == before + 1)
        if silent:
            step(pd.decode)
            assert metric(pd.decode, "quarantined_blocks", suffix="") > 0
        if policy == "fail":
            received = metric(pd.decode, "tokens_received")
            assert pd.serially(prompt).token_ids == expected
            eventually(lambda: metric(pd.decode, "tokens_received") > received)
            assert metric(pd.decode, "tokens_received") == received + len(prompt) - cached
        silencer.kinds = frozenset()
        pd.settled()
    pd.still_works(prompt, expected)


def test_prefill_that_is_killed_while_decode_waits_ends_the_request_by_policy(
    pd: PDPair, plain: Callable[[str], tuple[int, ...]], engine_pool: EnginePool
) -> None:
    """The last test that needs this prefill engine: it kills it."""
    prompt, other = "prefill dies " * 20, "decode goes on " * 20
    expected = plain(prompt)
    params = pd.to_decode(f"dies-{uuid.uuid4()}")
    before = metric(pd.decode, "failed_transfers", 'reason="peer_lost"')
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(complete, pd.decode.url, prompt, kv_transfer_params=params)
        time.sleep(1.0)
        killed = time.monotonic()
        pd.prefill.group.signal(signal.SIGKILL)
        answer = waiting.result()
    assert answer.token_ids == expected
    assert time.monotonic() - killed < GRACE_S + SLACK_S, "nobody waited for the deadline"
    engine_pool.stop(PREFILL)
    eventually(lambda: metric(pd.decode, "failed_transfers", 'reason="peer_lost"') == before + 1)
    settled(pd.decode)
    for asked in (prompt, other):
        assert complete(pd.decode.url, asked).token_ids == plain(asked)


def complete_raw(engine: RunningEngine, prompt: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the whole answer to a completion request with these fields."""
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "return_token_ids": True, **fields}
    address = urlsplit(engine.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
    finally:
        connection.close()
    assert response.status == 200, answer
    return json.loads(answer)


@contextmanager
def hanging(engine: RunningEngine, prompt: str, params: dict[str, Any], max_tokens: int = 24) -> Iterator[None]:
    """Send a completion request, and close the connection at the end of the block without reading the answer."""
    body = json.dumps(
        {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "kv_transfer_params": params}
    )
    host, port = engine.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        yield


def hang_up(engine: RunningEngine, prompt: str, params: dict[str, Any], after_s: float, max_tokens: int = 24) -> None:
    """Send a completion request and close the connection after a while."""
    with hanging(engine, prompt, params, max_tokens):
        threading.Event().wait(after_s)
