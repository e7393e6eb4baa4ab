"""What a step of the engine pays for requests that wait: a part of `python -m tests.bench.connector`.

vLLM asks every worker's connector for finished requests in every step, about a thousand times a second while requests
wait. 1,000 pulls are parked: decode waits for them, and prefill for their prompts. Times are processor time of the
asking thread for one call, medians over batches of calls. `tests.bench.parked` takes them, in a process with vLLM.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from devcluster.engine import ensure_engine_environment
from devcluster.paths import CHECKOUT, find_cache
from tests.bench.report import Figure

PARKED = 1000
TARGET_US = 20.0
ROLES = ("prefill", "decode")


def names() -> list[str]:
    """Return the names of the figures."""
    return [_name(call, role) for role in ROLES for call in ("get_finished", "all calls of a step")]


def measure() -> list[Figure]:
    """Return the times. Raises SystemExit with the end of the process' output if it failed."""
    environment = ensure_engine_environment(find_cache(os.environ).root, print)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        done = subprocess.run(
            [str(environment / "bin" / "python3"), "-m", "tests.bench.parked", str(PARKED), str(file)],
            cwd=CHECKOUT,
            env={
                **os.environ,
                "PYTHONPATH": f"{CHECKOUT / 'connector'}:{CHECKOUT}",
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
                "VLLM_LOGGING_LEVEL": "ERROR",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"bench: timing the connector's calls failed: {done.stdout[-3000:]}")
        found: dict[str, dict[str, float]] = json.loads(file.read_text())
    return [
        # The target is that of the call; what else vLLM asks for is shown beside it.
        Figure(_name(call, role), value, "us", target=TARGET_US if call == "get_finished" else None)
        for role in ROLES
        for call, value in found[role].items()
    ]


def _name(call: str, role: str) -> str:
    return f"{call} on {role}, {PARKED} parked"
