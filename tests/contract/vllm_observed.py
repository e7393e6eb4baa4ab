"""Run with the engine environment's Python: the connector's metrics and /query beside vLLM's own classes.

    python vllm_observed.py     prints {"query": {"ours", "vllm"}, "start", "end", "log": [...]}: what both bootstrap
                                servers answer for the same ranks, /metrics before and after some readings went through
                                vLLM's own logger classes, and the lines of vLLM's log

It imports vLLM and is therefore never imported by a test: the test starts it as a process.
"""

import json
import sys
import urllib.request
from types import SimpleNamespace

SECRET = b"the secret of this check"
READINGS = [
    {"bytes_sent": 5, "failed": {"deadline": 2}, "pinned_blocks": 7, "staging_bytes": {"1": 64}},
    {"write_seconds": [0.2, 0.3], "receive_seconds": [1.5], "tokens_recomputed": {"params_missing": 30}},
    {"bytes_sent": -1, "failed": {"no such reason": 1, "deadline": None}, "write_seconds": ["x"], "odd": object},
    {"bytes_sent": "x", "staging_bytes": 3, "receive_seconds": {"a": 1}, "failed": [1]},
    {"bytes_sent": 6, "pinned_blocks": 0},
]


def queries():
    """Return what our bootstrap server and vLLM's answer to /query for the same ranks."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_utils import MooncakeBootstrapServer

    from dcp_connector.bootstrap import BootstrapServer
    from dcp_connector.handshake import RankFacts, SideFacts, assemble
    from dcp_connector.wire import Layout, Page

    side = SideFacts("engine-1", "kv_producer", "h", "tiny", "uint8", "rows", Layout(4, 1, 16, 16, 1), 2)
    page = {"layer": Page(4096, 8, 16, 512, 512, 32, 32)}
    ranks = [RankFacts(side, tp, pp, f"tcp://10.0.0.{pp}:500{tp}", page) for pp in range(2) for tp in range(4)]
    ours, theirs = BootstrapServer(0, 1, SECRET, serves_query=True), MooncakeBootstrapServer("127.0.0.1", 0)
    ours.publish(assemble("g", ranks))
    theirs.start()
    for rank in ranks:
        entry = {"engine_id": "engine-1", "dp_rank": 0, "tp_rank": rank.tp_rank, "pp_rank": rank.pp_rank}
        post(theirs.port, "/register", {**entry, "addr": rank.control})
    answers = {"ours": get(ours.port), "vllm": get(theirs.port)}
    ours.close()
    theirs.shutdown()
    return answers


def get(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/query", timeout=10) as answer:
        return {"status": answer.status, "type": answer.headers["Content-Type"], "body": json.load(answer)}


def post(port, path, body):
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(asked, timeout=10).close()


def metrics():
    """Send readings through vLLM's Prometheus and log classes; return both texts and the log lines."""
    from prometheus_client import generate_latest
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

    transfer = KVTransferConfig(
        kv_connector="DCPMooncakeConnector", kv_connector_module_path="dcp_connector.connector", kv_role="kv_both"
    )
    parallel = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1)
    config = SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)
    shown = KVConnectorProm(config, ["model_name", "engine"], {0: ["tiny", "0"], 1: ["tiny", "1"]})
    logged = KVConnectorLogging(transfer)
    lines = []
    start = generate_latest().decode()
    for reading in READINGS:
        shown.observe(reading, 1)
        logged.observe(reading)
    logged.log(lambda form, *values: lines.append(form % values))
    logged.log(lambda form, *values: lines.append(form % values))
    return {"start": start, "end": generate_latest().decode(), "log": lines}


def main():
    print(json.dumps({"query": queries(), **metrics()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
