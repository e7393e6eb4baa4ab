"""Runs the byte oracle on this machine's device: `python -m tests.gpu`.

The test engine's torch is a build for the CPU. On a machine with a device name the interpreter of an environment that
has torch for it and the connector's dependencies, in DCP_GPU_PYTHON.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from devcluster.paths import CHECKOUT

DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def main() -> int:
    if not any(Path(device).exists() for device in DEVICES):
        print(f"the byte oracle did not run on a device: this machine has none (looked for {', '.join(DEVICES)})")
        return 0
    python = os.environ.get("DCP_GPU_PYTHON")
    if not python:
        print(
            "the byte oracle did not run on the device of this machine: set DCP_GPU_PYTHON to the interpreter of an "
            "environment that has torch for the device, numpy, pyzmq, msgspec and pydantic"
        )
        return 1
    environment = {**os.environ, "PYTHONPATH": f"{CHECKOUT / 'connector'}:{CHECKOUT}"}
    return subprocess.run(
        [python, "-m", "tests.gpu.oracle", "cuda"], cwd=CHECKOUT, env=environment, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
