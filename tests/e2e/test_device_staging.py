"""The code that moves memory of a device, on tensors in host memory; `make test-gpu` runs it on a device."""

from __future__ import annotations

import os
import subprocess

from devcluster.engine import ensure_engine_environment
from devcluster.paths import CHECKOUT, find_cache


def oracle(device: str) -> str:
    environment = ensure_engine_environment(find_cache(os.environ).root, print)
    done = subprocess.run(
        [str(environment / "bin" / "python3"), "-m", "tests.gpu.oracle", device],
        cwd=CHECKOUT,
        env={
            **os.environ,
            "PYTHONPATH": f"{CHECKOUT / 'connector'}:{CHECKOUT}",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_gathers_and_scatters_of_torch_move_every_byte_right() -> None:
    assert oracle("cpu").splitlines()[-1] == "the byte oracle ran on the CPU: 48 cases"


def test_without_a_device_the_oracle_says_that_it_did_not_run() -> None:
    assert oracle("cuda").startswith("the byte oracle did not run on a device: torch finds no CUDA")
