"""A process of the engine environment that answers for vLLM: its parser and its configuration objects.

Importing vLLM takes 10 s, an answer some milliseconds; so there is one process per version for all questions.
"""

import atexit
import json
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from devcluster.engine.environment import ensure_engine_environment
from devcluster.paths import CHECKOUT, this_cache
from tests.support.vllm_release import vllm_source

ORACLE = Path(__file__).parent / "vllm_oracle" / "main.py"

#: Version -> its full number where its source has to be fetched; None where the engine environment has it installed.
VERSIONS: dict[str, str | None] = {"0.32": None, "0.33": "0.33.0"}


@cache
def vllm_process(version: str) -> "VllmProcess":
    """Return the process of a version, started by the first who asks and ended with this one."""
    process = VllmProcess(version)
    atexit.register(process.close)
    return process


class VllmProcess:
    """Asks one version of vLLM. To be closed."""

    def __init__(self, version: str):
        environment = os.environ.get("DCP_ENGINE_ENV") or ensure_engine_environment(this_cache().root, print)
        release = VERSIONS[version]
        path = [*([str(vllm_source(release))] if release else []), str(CHECKOUT / "connector")]
        self.version = version
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed together with the process
        self._process = subprocess.Popen(
            [Path(environment) / "bin" / "python3", ORACLE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)},
            text=True,
        )

    def ask(self, op: str, **arguments: Any) -> Any:
        """Return the answer to one request."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._process.wait(timeout=60)
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")[-4000:]
            raise AssertionError(f"the process that asks vLLM {self.version} ended: {said}")
        return json.loads(answer)

    def close(self) -> None:
        """End the process: it ends by itself when nothing more is asked."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()
        self._log.close()
