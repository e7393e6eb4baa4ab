"""A stand-in for an engine with the connector: the endpoints that probes, router and operator use, and no model.

Started as `python -c SOURCE --flag=value ...`, it takes the arguments that the operator renders and needs the port.
"""

import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self, code: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path.startswith("/readyz") and Path("/tmp/unready").exists():
            self.answer(503, {"why": "told to be"})
        elif self.path.startswith("/v1/models"):
            self.answer(200, {"object": "list", "data": [{"id": "chat", "object": "model"}]})
        else:
            self.answer(200, {"status": "ok"})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        transfer = asked.get("kv_transfer_params") or {}
        answer = {
            "id": "x",
            "object": "text_completion",
            "model": "chat",
            "choices": [{"index": 0, "text": json.dumps(transfer, sort_keys=True), "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        if transfer.get("do_remote_decode"):
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "transfer_id": "stand-in",
                "remote_engine_id": os.environ.get("VLLM_HOST_IP"),
            }
        self.answer(200, answer)


def serve(port: int) -> None:
    ThreadingHTTPServer(("0.0.0.0", port), Handler).serve_forever()


if __name__ == "__main__":
    # The first process of a container gets no default handling of signals.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    options = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:] if "=" in argument)
    threading.Thread(target=serve, args=(int(os.environ["VLLM_MOONCAKE_BOOTSTRAP_PORT"]),), daemon=True).start()
    serve(int(options["port"]))
