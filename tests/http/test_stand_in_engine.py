"""The stand-in engine does what an engine with the connector does, so that tests of the operator mean something."""

import http.client
import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from dcp_connector.params import Fetch, HandOff, parse
from dcp_connector.stats import METRICS
from tests.support import stand_in_engine
from tests.support.operator_process import STAND_IN, wait_for
from tests.support.stand_in_engine import SERIES, Engine, server
from tests.support.stand_ins import Served, call, numbers_of, served

PROMPT = {"model": "chat", "prompt": "one two three", "max_tokens": 4}
SERIAL = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": None, "remote_engine_id": None}


class Started:
    """One role's engine with both ports open in this process."""

    def __init__(self, role: str, told: dict, *arguments: str) -> None:
        kv_role = {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
        transfer = json.dumps({"kv_role": kv_role, "kv_load_failure_policy": told.pop("policy", "recompute")})
        environment = {"STAND_IN": json.dumps(told), "STAND_IN_POD": f"chat-{role}-0123abcd-5f7d-x2x"}
        self.engine = Engine([f"--kv-transfer-config={transfer}", *arguments], environment)
        self._servers = [server(self.engine, 0, is_api=is_api, host="127.0.0.1") for is_api in (True, False)]
        self.api, self.bootstrap = (f"http://127.0.0.1:{one.server_address[1]}" for one in self._servers)
        self.engine.bootstrap_port = self._servers[1].server_address[1]
        self.engine.is_open.set()
        for one in self._servers:
            threading.Thread(target=one.serve_forever, args=(0.01,), daemon=True).start()

    def complete(self, params: dict | None = None, **more) -> dict:
        return call(f"{self.api}/v1/completions", {**PROMPT, "kv_transfer_params": params, **more})

    def tell(self, **settings) -> None:
        call(f"{self.bootstrap}/control", settings)

    def numbers(self) -> dict[str, float]:
        return numbers_of(self._text("/metrics"))

    def _text(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.api}{path}", timeout=10) as answer:
            return answer.read().decode()

    def close(self) -> None:
        for one in self._servers:
            one.shutdown()
            one.server_close()


@contextmanager
def pair(prefill: dict | None = None, decode: dict | None = None) -> Iterator[tuple[Started, Started]]:
    p, d = Started("prefill", dict(prefill or {})), Started("decode", dict(decode or {}))
    try:
        yield p, d
    finally:
        p.close()
        d.close()


def through(p: Started, d: Started) -> Served:
    """One prompt in the serial flow, as the router sends it."""
    return served(d.complete(p.complete(SERIAL)["kv_transfer_params"]))


def test_decode_fetches_from_prefill_and_names_the_pair():
    with pair() as (p, d):
        went = through(p, d)
        assert went.prefill == {"pod": "chat-prefill-0123abcd-5f7d-x2x", "revision": "0123abcd"}
        assert went.decode == {"pod": "chat-decode-0123abcd-5f7d-x2x", "revision": "0123abcd"}
        assert went.recomputed is None
        sent, received = p.numbers(), d.numbers()
        assert sent["vllm:dcp_kv_bytes_sent_total"] == received["vllm:dcp_kv_bytes_received_total"] == 3000
        assert sent["vllm:dcp_kv_pinned_requests"] == received["vllm:dcp_kv_tokens_recomputed_total"] == 0


def test_the_concurrent_flow_works_too():
    with pair() as (p, d):
        p.complete({"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t-1"})
        asked = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "t-1"}
        went = served(d.complete({**asked, "remote_bootstrap_addr": p.bootstrap}))
        assert went.prefill is not None
        assert went.recomputed is None


def test_the_connector_takes_what_the_stand_in_hands_over():
    with pair() as (p, _):
        assert isinstance(parse(SERIAL), HandOff)
        assert isinstance(parse(p.complete(SERIAL)["kv_transfer_params"]), Fetch)


def test_every_series_has_a_name_that_engines_have():
    suffix = {"counter": "_total", "gauge": "", "histogram": ""}
    known = {metric.name + suffix[metric.kind] for metric in METRICS}
    ours = {name.partition("|")[0] for name, _, _ in SERIES if ":dcp_" in name}
    assert ours <= known


def test_query_has_the_form_that_routers_read():
    with pair() as (p, _):
        answer = call(f"{p.bootstrap}/query")
        assert answer == {"0": {"engine_id": p.engine.engine_id, "worker_addr": {"0": {"0": "tcp://127.0.0.1:20000"}}}}


FALLBACKS = {
    "prefill is gone": ({}, {}, "bootstrap_unreachable"),
    "decode's deadline passes": ({"transfer": "hang"}, {"deadline_s": 0.1}, "deadline"),
    "decode is told to recompute": ({}, {"transfer": "recompute"}, "deadline"),
    "the handshake is refused": ({}, {"refuse": "block size 32 beside 64"}, "incompatible"),
    "the lease is over": ({"lease_s": 0.0}, {}, "lease_expired"),
    "prefill has no connector": ({"transfer": "none"}, {}, "params_missing"),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_a_prompt_that_was_not_transferred_is_counted_with_its_reason(case: str):
    prefill, decode, reason = FALLBACKS[case]
    with pair(prefill, decode) as (p, d):
        params = p.complete(SERIAL).get("kv_transfer_params")
        if case == "prefill is gone":
            params["remote_bootstrap_addr"] = "http://127.0.0.1:9"
        assert served(d.complete(params)).recomputed == reason
        assert d.numbers()["vllm:dcp_kv_tokens_recomputed_total"] == 3
        assert d.numbers()["vllm:dcp_kv_bytes_received_total"] == 0
        assert d.numbers()["vllm:dcp_kv_refused_peers_total"] == (1 if reason == "incompatible" else 0)


def test_by_the_other_policy_the_request_fails():
    with pair({}, {"policy": "fail", "transfer": "recompute"}) as (p, d):
        with pytest.raises(urllib.error.HTTPError, match="500"):
            through(p, d)
        assert d.numbers()["vllm:dcp_kv_tokens_recomputed_total"] == 0


def test_decode_without_a_connector_counts_nothing():
    with pair({}, {"transfer": "none"}) as (p, d):
        assert through(p, d).recomputed is None
        assert d.numbers()["vllm:dcp_kv_bytes_received_total"] == 0


def test_pins_are_held_until_the_stand_in_is_told_to_let_go():
    with pair({"hold_pinned": True}) as (p, d):
        through(p, d)
        assert p.numbers()["vllm:dcp_kv_pinned_requests"] == 1
        p.tell(hold_pinned=False)
        assert p.numbers()["vllm:dcp_kv_pinned_requests"] == 0


def test_running_and_waiting_requests_are_in_the_metrics():
    with pair({"completions": "hang", "max_running": 1}) as (p, _), ExitStack() as connections:
        for _ in range(3):
            connection = connections.enter_context(closing(http.client.HTTPConnection(p.api.removeprefix("http://"))))
            connection.request("POST", "/v1/completions", json.dumps(PROMPT))
        wait_for("one runs", lambda: p.numbers()["vllm:num_requests_running"] == 1, every_s=0.02)
        wait_for("two wait", lambda: p.numbers()["vllm:num_requests_waiting"] == 2, every_s=0.02)


@pytest.mark.parametrize(
    ("told", "path"),
    [({"unready": "no"}, "/readyz"), ({"unhealthy": "no"}, "/healthz"), ({"unhealthy": "no"}, "/health")],
)
def test_it_fails_a_probe_when_told_to(told: dict, path: str):
    with pair() as (p, _):
        assert p.engine.is_open.is_set()
        p.tell(**told)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            call(p.bootstrap + path)
        p.tell(unready="", unhealthy="")


def test_completions_fail_when_told_to():
    with pair({"completions": "error"}) as (p, _), pytest.raises(urllib.error.HTTPError, match="500"):
        p.complete(SERIAL)


def test_an_unknown_setting_is_refused():
    with pytest.raises(ValueError, match="no settings: latncy_s"):
        Engine([], {"STAND_IN": '{"latncy_s": 1}'})


def test_every_setting_is_described():
    lines = (stand_in_engine.__doc__ or "").splitlines()
    described = {line.split()[0] for line in lines if line.startswith("    ") and not line.startswith("     ")}
    assert described == set(stand_in_engine.SETTINGS) - {"exit_code", "crash_after_s"}


def _run(*arguments: str, **told) -> subprocess.Popen:
    command, environment = [sys.executable, "-c", STAND_IN, *arguments], {"STAND_IN": json.dumps(told)}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_it_ends_with_the_last_line_that_it_was_told():
    with _run("--port=0", exit="RuntimeError: CUDA out of memory", exit_code=3) as process:
        assert process.communicate(timeout=30)[1].splitlines()[-1] == "RuntimeError: CUDA out of memory"
        assert process.returncode == 3


def test_it_ends_on_sigterm_when_no_request_runs():
    with _run("--port=0", "--shutdown-timeout=60") as process:
        wait_for("it has its handler", lambda: _catches_term(process.pid))
        process.terminate()
        assert process.wait(30) == 0


def _catches_term(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    [caught] = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(int(caught, 16) & 1 << (signal.SIGTERM - 1))
