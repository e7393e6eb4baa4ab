"""Times the connector's own calls with many parked requests: `python -m tests.bench.parked PARKED FILE`.

Run with the engine environment's interpreter, because vLLM's classes are the connector's bases; `tests.bench.steps`
does so. Prefill and decode are one rank each, `DCPMooncakeConnector`s of this process that vLLM's own process groups,
cache specs and the TransferEngine serve. Decode loads what prefill never computes, so all of it waits on both sides.

Writes {role: {call: microseconds}} to FILE.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from dcp_connector.config import SECRET_FILE_ENV
from dcp_connector.connector import DCPMooncakeConnector, StepMetadata
from dcp_connector.requests_decode import Load
from dcp_connector.work import StepWork

BATCHES, CALLS = 50, 200
BLOCKS, BLOCK, HEADS, HEAD_SIZE = 8, 16, 1, 8
LAYER = "layer.0"

Side = tuple[DCPMooncakeConnector, DCPMooncakeConnector]


def engine_config(role: str, engine_id: str) -> Any:
    """Return the parts of a VllmConfig that the connector reads: a whole one needs a model's files."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            engine_id=engine_id,
            kv_role=role,
            is_kv_producer=role == "kv_producer",
            is_kv_consumer=role == "kv_consumer",
            kv_load_failure_policy="fail",
            # Nothing may end meanwhile.
            kv_connector_extra_config={
                "mooncake_protocol": "tcp",
                "bootstrap_port": 18998 + (role == "kv_consumer"),
                "request_timeout_s": 3600.0,
            },
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=BLOCK,
            data_parallel_rank_local=0,
            data_parallel_size_local=1,
            nnodes=1,
        ),
        model_config=SimpleNamespace(
            model="parked",
            served_model_name="parked",
            dtype=torch.bfloat16,
            quantization=None,
            use_mla=False,
            hf_text_config=SimpleNamespace(),
            get_total_num_kv_heads=lambda: HEADS,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(
            static_forward_context={LAYER: SimpleNamespace(impl=SimpleNamespace(supports_dcp=True))}
        ),
    )


def cache_config() -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16)
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([LAYER], spec)])


@contextmanager
def connectors(role: str) -> Iterator[Side]:
    """Make an engine's two connectors, the scheduler's and the worker's, and introduce them to each other."""
    config, cache = engine_config(role, f"{role}-0"), cache_config()
    scheduler = DCPMooncakeConnector(config, KVConnectorRole.SCHEDULER, cache)
    worker = DCPMooncakeConnector(config, KVConnectorRole.WORKER, cache)
    try:
        entry = 2 * HEAD_SIZE  # a key and a value
        worker.register_kv_caches({LAYER: torch.zeros(BLOCKS, HEADS, BLOCK, entry, dtype=torch.bfloat16)})
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})
        yield scheduler, worker
    finally:
        worker.shutdown()
        scheduler.shutdown()


def calls_of_a_step(worker: DCPMooncakeConnector) -> None:
    """Ask a rank for all that vLLM asks it for in a step."""
    worker.get_transfer_results(set())
    worker.get_block_ids_with_load_errors()
    worker.get_kv_connector_stats()
    worker.build_connector_worker_meta()


def microseconds(call: Callable[[], object]) -> float:
    """Return the processor time of this thread for one call, the median over batches of calls."""
    batches: list[float] = []
    for _ in range(BATCHES):
        begin = time.thread_time()
        for _ in range(CALLS):
            call()
        batches.append((time.thread_time() - begin) / CALLS * 1e6)
    return statistics.median(batches)


def park(prefill: Side, decode: Side, count: int) -> None:
    """Let decode load so many requests, and wait until all of them wait on prefill."""
    origin = f"http://127.0.0.1:{prefill[0]._bootstrap.port}"
    loads = [Load(f"r{n}", f"t{n}", origin, "kv_producer-0", (1,), 0, BLOCK, b"") for n in range(count)]
    decode[1].bind_connector_metadata(StepMetadata(StepWork(loads=loads)))
    decode[1].start_load_kv(None)
    requests, deadline = prefill[1]._worker._prefill._requests, time.monotonic() + 120
    while requests.num_waiting != count:
        if time.monotonic() > deadline:
            raise SystemExit(f"bench: only {requests.num_waiting} of {count} pulls arrived")
        time.sleep(0.01)


def main(count: int, file: Path) -> None:
    """Measure and write the file."""
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.write_bytes(b"the secret of the bench of idle steps")
        os.environ.update({SECRET_FILE_ENV: str(secret), "VLLM_HOST_IP": "127.0.0.1"})
        with set_current_vllm_config(VllmConfig()):
            parallel_state.init_distributed_environment(1, 0, f"file://{folder}/ranks", 0, "gloo")
            parallel_state.initialize_model_parallel()
        with connectors("kv_producer") as prefill, connectors("kv_consumer") as decode:
            park(prefill, decode, count)
            found = {
                role: {
                    "get_finished": microseconds(lambda worker=worker: worker.get_finished(set())),
                    "all calls of a step": microseconds(lambda worker=worker: calls_of_a_step(worker)),
                }
                for role, worker in (("prefill", prefill[1]), ("decode", decode[1]))
            }
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
