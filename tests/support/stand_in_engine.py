"""A stand-in for an engine with the connector: its ports, its metrics, its hand-off of prompts, and no model.

Started as `python -c SOURCE --flag=value ...` it takes the arguments and the environment that the operator renders.
Both ports serve `/control`: GET returns the settings below, POST with a JSON object changes some. The variable
STAND_IN holds such an object for the start. `tests/support/stand_ins.py` puts words to that.

    latency_s      seconds that a completion takes (0)
    max_running    completions at the same time; more wait, and are counted as waiting (256)
    start_s        seconds from the start to the open port of the API, as loading a model takes; only at the start (0)
    exit           last line before the process ends with exit_code (1); with crash_after_s so many seconds later
    unready        words with which /readyz answers 503
    unhealthy      words with which /health and /healthz answer 503
    completions    "answer", "error" (500), "hang" (never an answer)
    transfer       on prefill: "offer", "hang" (decode's pull never ends), "none" (no parameters for decode);
                   on decode: "pull", "recompute" (its deadline passed), "none" (ignores the parameters, counts nothing)
    refuse         decode: words of a refused handshake; it computes the prompt itself, or fails by its policy
    hold_pinned    prefill: prompts stay pinned although they were fetched, until this is false again
    lease_s        prefill: seconds after which a prompt that nobody fetched is given up (60)
    deadline_s     decode: seconds for a pull (5)

With --headless it is a node of an engine beside the first one. With the variable STAND_IN_MEET, a folder that all nodes
have, the first one waits for the others before it opens the port of its API.

Prefill's answer says who computed the prompt, decode asks prefill for it as the connector would, and the text of its
answer is JSON: {"prefill": {"pod", "revision"} or null, "decode": {"pod", "revision"}, "recomputed": reason or null}.
"""

import contextlib
import http.client
import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

BYTES_PER_TOKEN = 1000
SETTINGS = {
    "latency_s": 0.0,
    "max_running": 256,
    "start_s": 0.0,
    "exit": "",
    "exit_code": 1,
    "crash_after_s": 0.0,
    "unready": "",
    "unhealthy": "",
    "completions": "answer",
    "transfer": "",
    "refuse": "",
    "hold_pinned": False,
    "lease_s": 60.0,
    "deadline_s": 5.0,
}
#: Series that exist from the start, as the connector's and vLLM's do: name, kind, labels.
SERIES = (
    ("vllm:num_requests_running", "gauge", ""),
    ("vllm:num_requests_waiting", "gauge", ""),
    ("vllm:prompt_tokens_total", "counter", ""),
    ("vllm:generation_tokens_total", "counter", ""),
    ("vllm:dcp_kv_bytes_sent_total", "counter", ""),
    ("vllm:dcp_kv_bytes_received_total", "counter", ""),
    ("vllm:dcp_kv_tokens_received_total", "counter", ""),
    ("vllm:dcp_kv_refused_peers_total", "counter", ""),
    ("vllm:dcp_kv_pinned_requests", "gauge", ""),
    ("vllm:dcp_kv_pinned_blocks", "gauge", ""),
    *(
        (f"vllm:dcp_kv_transfers_total|{outcome}", "counter", f',outcome="{outcome}"')
        for outcome in ("sent", "received", "failed", "expired")
    ),
    *(
        (f"vllm:dcp_kv_{what}_total|{reason}", "counter", f',reason="{reason}"')
        for what in ("tokens_recomputed", "failed_transfers")
        for reason in ("params_missing", "bootstrap_unreachable", "deadline", "incompatible", "lease_expired")
    ),
)
#: "NAME-prefill-REVISION-..." is the name of a pod that the operator's workloads make.
_POD_NAME = re.compile(r"-(?:prefill|decode)-([0-9a-f]{8})(?:-|$)")


class Engine:
    """What the two servers share. `arguments` and `environment` are those of an engine's container."""

    def __init__(self, arguments, environment):
        self.options = dict(word.removeprefix("--").split("=", 1) for word in arguments if "=" in word)
        transfer = json.loads(self.options.get("kv-transfer-config") or "{}")
        self.is_prefill = transfer.get("kv_role") == "kv_producer"
        self.recomputes = transfer.get("kv_load_failure_policy", "recompute") != "fail"
        self.model = self.options.get("served-model-name", "chat")
        self.address = environment.get("VLLM_HOST_IP", "127.0.0.1")
        self.bootstrap_port = int(environment.get("VLLM_MOONCAKE_BOOTSTRAP_PORT") or 0)
        self.pod = environment.get("STAND_IN_POD") or socket.gethostname()
        found = _POD_NAME.search(self.pod)
        self.revision = environment.get("STAND_IN_REVISION") or (found[1] if found else "")
        # One generation per start, as engine ids are: at the same address another engine answers after a restart.
        self.engine_id = f"{self.pod}-{time.time_ns():x}"
        self.settings = dict(SETTINGS)
        self.numbers = {name: 0 for name, _, _ in SERIES}
        self.pinned = {}
        self.failures = {}
        self.is_open = threading.Event()
        self._changed = threading.Condition()
        self._ids = itertools.count(1)
        self.change(json.loads(environment.get("STAND_IN") or "{}"))

    def change(self, settings):
        """Take in settings; raise ValueError with the reason for one that does not exist."""
        unknown = sorted(set(settings) - set(SETTINGS))
        if unknown:
            raise ValueError(f"no settings: {', '.join(unknown)}; there are {', '.join(SETTINGS)}")
        with self._changed:
            self.settings.update(settings)
            if not self.settings["hold_pinned"]:
                self.pinned = {name: entry for name, entry in self.pinned.items() if not entry["fetched"]}
            self._changed.notify_all()
        if settings.get("exit") or settings.get("crash_after_s"):
            last_line = self.settings["exit"] or "RuntimeError: told to crash"
            threading.Timer(self.settings["crash_after_s"], end, (last_line, self.settings["exit_code"])).start()

    def add(self, name, amount=1):
        """Add to a number of the metrics."""
        with self._changed:
            self.numbers[name] += amount

    @contextlib.contextmanager
    def running(self):
        """Be one of the requests that run, after having waited for a place."""
        with self._changed:
            self.numbers["vllm:num_requests_waiting"] += 1
            self._changed.wait_for(lambda: self.numbers["vllm:num_requests_running"] < self.settings["max_running"])
            self.numbers["vllm:num_requests_waiting"] -= 1
            self.numbers["vllm:num_requests_running"] += 1
        try:
            yield
        finally:
            with self._changed:
                self.numbers["vllm:num_requests_running"] -= 1
                self._changed.notify_all()

    def wait_idle(self, timeout_s):
        """Wait until no request runs or waits."""
        with self._changed:
            self._changed.wait_for(
                lambda: not (self.numbers["vllm:num_requests_running"] or self.numbers["vllm:num_requests_waiting"]),
                timeout_s,
            )

    def metrics(self):
        """Return the text of /metrics."""
        self._expire()
        with self._changed:
            blocks = sum(entry["tokens"] for entry in self.pinned.values())
            self.numbers |= {"vllm:dcp_kv_pinned_requests": len(self.pinned), "vllm:dcp_kv_pinned_blocks": blocks}
            lines, said = [], set()
            for key, kind, labels in SERIES:
                name = key.partition("|")[0]
                family = name.removesuffix("_total")
                if family not in said:
                    said.add(family)
                    lines.append(f"# TYPE {family} {kind}")
                lines.append(f'{name}{{engine="0",model_name="{self.model}"{labels}}} {float(self.numbers[key])}')
        return "\n".join(lines) + "\n"

    def offer(self, transfer_id, tokens):
        """Prefill: pin a prompt's KV; return what the router hands to decode."""
        if self.settings["transfer"] == "none":
            return None
        transfer_id = transfer_id or f"{self.pod}-{next(self._ids)}"
        with self._changed:
            self.pinned[transfer_id] = {"tokens": tokens, "since": time.monotonic(), "fetched": False}
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_bootstrap_addr": f"http://{self.address}:{self.bootstrap_port}",
            "remote_engine_id": self.engine_id,
            "remote_num_tokens": tokens,
            "stand_in": {"pod": self.pod, "revision": self.revision},
        }

    def give(self, transfer_id):
        """Prefill: hand a pinned prompt over; return who computed it, or None if it is not there."""
        if self.settings["transfer"] == "hang":
            threading.Event().wait()
        self._expire()
        with self._changed:
            entry = self.pinned.get(transfer_id)
            if entry is None or entry["fetched"]:
                return None
            if self.settings["hold_pinned"]:
                entry["fetched"] = True
            else:
                del self.pinned[transfer_id]
            self.numbers["vllm:dcp_kv_bytes_sent_total"] += entry["tokens"] * BYTES_PER_TOKEN
            self.numbers["vllm:dcp_kv_transfers_total|sent"] += 1
        return {"pod": self.pod, "revision": self.revision, "tokens": entry["tokens"]}

    def fetch(self, params, tokens):
        """Decode: get a prompt from prefill; return who computed it and why it was computed here, if so."""
        prefill = params.get("stand_in")
        if self.settings["transfer"] == "none":
            return prefill, None
        if not params.get("do_remote_prefill"):
            self.add("vllm:dcp_kv_tokens_recomputed_total|params_missing", tokens)
            return None, "params_missing"
        reason = None
        if self.settings["refuse"]:
            reason = "incompatible"
            self.add("vllm:dcp_kv_refused_peers_total")
            print(f"refused {params.get('remote_engine_id')}: {self.settings['refuse']}", file=sys.stderr, flush=True)
        elif self.settings["transfer"] == "recompute":
            reason = "deadline"
        else:
            given, reason = self._pull(params)
            prefill = given or prefill
        if reason is None:
            self.add("vllm:dcp_kv_bytes_received_total", tokens * BYTES_PER_TOKEN)
            self.add("vllm:dcp_kv_tokens_received_total", tokens)
            self.add("vllm:dcp_kv_transfers_total|received")
        else:
            words = self.settings["refuse"] or f"the stand-in's pull ended: {reason}"
            self.failures[reason] = {"reason": reason, "detail": words, "count": 1, "at": int(time.time())}
            self.add(f"vllm:dcp_kv_failed_transfers_total|{reason}")
            self.add(
                "vllm:dcp_kv_transfers_total|expired" if reason == "deadline" else "vllm:dcp_kv_transfers_total|failed"
            )
            if self.recomputes:
                self.add(f"vllm:dcp_kv_tokens_recomputed_total|{reason}", tokens)
        return prefill and {key: prefill[key] for key in ("pod", "revision")}, reason

    def _pull(self, params):
        """Return who computed the prompt, or why it can't be had."""
        where = urlsplit(params.get("remote_bootstrap_addr") or "")
        connection = http.client.HTTPConnection(where.hostname, where.port or 80, timeout=self.settings["deadline_s"])
        try:
            connection.request("POST", "/stand-in/pull", json.dumps({"transfer_id": params.get("transfer_id")}))
            answer = connection.getresponse()
            body = json.loads(answer.read())
        except TimeoutError:
            return None, "deadline"
        except (OSError, http.client.HTTPException, ValueError):
            return None, "bootstrap_unreachable"
        finally:
            connection.close()
        return (body, None) if answer.status == 200 else (None, "lease_expired")

    def _expire(self):
        """Give up what nobody fetched within the lease."""
        with self._changed:
            limit = time.monotonic() - self.settings["lease_s"]
            late = [name for name, entry in self.pinned.items() if entry["since"] < limit and not entry["fetched"]]
            for name in late:
                del self.pinned[name]
            self.numbers["vllm:dcp_kv_transfers_total|expired"] += len(late)


class Handler(BaseHTTPRequestHandler):
    """Serves one of the two ports: `is_api` tells which."""

    protocol_version = "HTTP/1.1"
    engine = None
    is_api = True

    def log_message(self, *arguments):
        pass

    def answer(self, code, value, kind="application/json"):
        body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(code)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def asked(self):
        return json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")

    def do_GET(self):
        engine, path = self.engine, self.path.partition("?")[0]
        settings = engine.settings
        if path == "/control":
            about = {"pod": engine.pod, "revision": engine.revision, "engine_id": engine.engine_id}
            self.answer(200, {**settings, **about, "pinned": len(engine.pinned)})
        elif path in ("/health", "/healthz"):
            words = settings["unhealthy"]
            self.answer(503 if words else 200, {"status": words or "ok"})
        elif path == "/readyz":
            words = settings["unready"] or settings["unhealthy"] or ("" if engine.is_open.is_set() else "starting")
            self.answer(503 if words else 200, f"{words or 'ready'}\n", "text/plain")
        elif path == "/v1/failures":
            self.answer(200, {"failures": list(engine.failures.values())})
        elif path == "/query" and engine.is_prefill:
            ranks = int(engine.options.get("tensor-parallel-size", 1))
            workers = {str(rank): {"0": f"tcp://{engine.address}:{20000 + rank}"} for rank in range(ranks)}
            self.answer(200, {"0": {"engine_id": engine.engine_id, "worker_addr": workers}})
        elif path == "/metrics" and self.is_api:
            self.answer(200, engine.metrics(), "text/plain; version=0.0.4")
        elif path == "/v1/models" and self.is_api:
            self.answer(200, {"object": "list", "data": [{"id": engine.model, "object": "model"}]})
        else:
            self.answer(404, {"error": f"no {path}"})

    def do_POST(self):
        path, asked = self.path.partition("?")[0], self.asked()
        if path == "/control":
            try:
                self.engine.change(asked)
            except ValueError as error:
                self.answer(400, {"error": str(error)})
            else:
                self.answer(200, {"settings": self.engine.settings})
        elif path == "/stand-in/pull":
            given = self.engine.give(asked.get("transfer_id"))
            self.answer(200 if given else 404, given or {"error": "no such transfer"})
        elif path in ("/v1/completions", "/v1/chat/completions") and self.is_api:
            self.complete(asked, is_chat="chat" in path)
        else:
            self.answer(404, {"error": f"no {path}"})

    def complete(self, asked, *, is_chat):
        engine, how = self.engine, self.engine.settings["completions"]
        if how == "error":
            self.answer(500, {"error": {"message": "told to fail", "type": "InternalServerError", "code": 500}})
            return
        prompt = json.dumps(asked.get("messages")) if is_chat else str(asked.get("prompt", ""))
        tokens = max(1, len(prompt.split()))
        params = asked.get("kv_transfer_params") or {}
        with engine.running():
            if how == "hang":
                threading.Event().wait()
            offered, said, reason = None, {}, None
            if engine.is_prefill:
                time.sleep(engine.settings["latency_s"])
                if params.get("do_remote_decode"):
                    offered = engine.offer(params.get("transfer_id"), tokens)
            else:
                prefill, reason = engine.fetch(params, tokens)
                time.sleep(engine.settings["latency_s"])
                said = {"prefill": prefill, "decode": {"pod": engine.pod, "revision": engine.revision}}
                said["recomputed"] = reason
        if reason is not None and reason != "params_missing" and not engine.recomputes:
            self.answer(500, {"error": {"message": f"KV load failed: {reason}", "code": 500}})
            return
        engine.add("vllm:prompt_tokens_total", tokens)
        engine.add("vllm:generation_tokens_total")
        text = json.dumps(said, sort_keys=True)
        choice = {"index": 0, "finish_reason": "stop"}
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        usage = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
        kind = "chat.completion" if is_chat else "text_completion"
        result = {"id": "stand-in", "object": kind, "model": engine.model, "choices": [choice], "usage": usage}
        if offered is not None:
            result["kv_transfer_params"] = offered
        if asked.get("stream"):
            self.answer(200, f"data: {json.dumps(result)}\n\ndata: [DONE]\n\n", "text/event-stream")
        else:
            self.answer(200, result)


def end(last_line, exit_code):
    """End the process at once with a last line, as an engine does that fails."""
    print(last_line, file=sys.stderr, flush=True)
    os._exit(exit_code)


def server(engine, port, *, is_api, host="0.0.0.0"):
    """Return a server for one of the ports; with 0 the system chooses it."""
    handler = type("Bound", (Handler,), {"engine": engine, "is_api": is_api})
    result = ThreadingHTTPServer((host, port), handler)
    result.daemon_threads = True
    return result


def be_a_node(folder):
    """Be a node of an engine that is not its first: serve nothing, and say in a folder of all nodes that it is there.

    Pods would find their leader by DNS, which the local cluster does not have.
    """
    while True:
        if folder:
            Path(folder, f"{os.environ['LWS_LEADER_ADDRESS']}.{os.environ['LWS_WORKER_INDEX']}").write_text("here")
        time.sleep(0.3)


def wait_for_nodes(folder, count):
    """Return when the other nodes of the engine whose leader this is are there, since this process began."""
    since, leader = time.time(), os.environ.get("LWS_LEADER_ADDRESS", "")
    wanted = [Path(folder, f"{leader}.{index}") for index in range(1, count)]
    while not all(path.exists() and path.stat().st_mtime > since for path in wanted):
        time.sleep(0.1)


def main():
    engine = Engine(sys.argv[1:], os.environ)

    def stop(*_):
        # As vLLM: what runs may end first, for as long as --shutdown-timeout says.
        def finish():
            engine.wait_idle(float(engine.options.get("shutdown-timeout", 0)))
            os._exit(0)

        threading.Thread(target=finish).start()

    # The first process of a container gets no default handling of signals.
    signal.signal(signal.SIGTERM, stop)
    folder = os.environ.get("STAND_IN_MEET", "")
    if "--headless" in sys.argv:
        be_a_node(folder)
    if engine.bootstrap_port:
        bootstrap = server(engine, engine.bootstrap_port, is_api=False)
        threading.Thread(target=bootstrap.serve_forever, daemon=True).start()
    time.sleep(engine.settings["start_s"])
    if folder:
        wait_for_nodes(folder, int(engine.options.get("nnodes", 1)))
    api = server(engine, int(engine.options["port"]), is_api=True)
    engine.is_open.set()
    api.serve_forever()


if __name__ == "__main__":
    main()
