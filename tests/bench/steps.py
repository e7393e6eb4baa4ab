"""What a step of the engine pays for requests that wait: `python -m tests.bench.steps`.

vLLM asks every worker for finished requests in every step, about a thousand times a second while requests wait. 1,000
pulls are parked: decode waits for them, and prefill for their prompts. Times are processor time of the asking thread
for one call, medians over batches of calls. Prints a table and writes build/bench/steps.json.
"""

import statistics
import sys
import time

from dcp_connector.requests_decode import Load
from dcp_connector.work import StepWork
from dcp_connector.worker import WorkerSide
from tests.bench.report import Figure, publish
from tests.support.kv_oracle import Sizes
from tests.support.transfer_memory import engine, wait_for

PARKED, BATCHES, CALLS = 1000, 50, 200
TARGET_US = 20.0
ONE = Sizes(1, 1, 16, 16, 1)


def main() -> int:
    """Measure, print, write the file. Returns 0 when the target was reached."""
    with engine("kv_producer", ONE) as p, engine("kv_consumer", ONE) as d:
        loads = [Load(f"r{n}", f"t{n}", p.origin, p.engine_id, (1,), 0, 16, b"") for n in range(PARKED)]
        d.start(StepWork(loads=loads))
        requests = p.workers[0]._prefill._requests
        wait_for(lambda: requests.num_waiting == PARKED, 60, f"only {requests.num_waiting} pulls arrived")
        figures = [
            Figure(f"get_finished on {name}, {PARKED} parked", _microseconds(side.workers[0]), "us", target=TARGET_US)
            for name, side in (("prefill", p), ("decode", d))
        ]
    return 0 if publish("steps", figures) else 1


def _microseconds(worker: WorkerSide) -> float:
    """Return the time of what `DCPMooncakeConnector.get_finished` asks of a rank."""
    batches: list[float] = []
    for _ in range(BATCHES):
        begin = time.thread_time()
        for _ in range(CALLS):
            worker.finished()
            worker.take_failed_requests()
            worker.take_failed_blocks()
        batches.append((time.thread_time() - begin) / CALLS * 1e6)
    return statistics.median(batches)


if __name__ == "__main__":
    sys.exit(main())
