"""A module of ours that runs in the engine environment, takes commands as JSON lines, and answers each with one."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from devcluster.engine import ensure_engine_environment
from devcluster.paths import CHECKOUT, find_cache


class CommandProcess:
    """The process of a module. What it says on standard error goes to the end of `log`. To be stopped."""

    def __init__(self, module: str, *arguments: str, log: Path) -> None:
        environment = ensure_engine_environment(find_cache(os.environ).root, print)
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [str(environment / "bin" / "python3"), "-m", module, *arguments],
                cwd=CHECKOUT,
                env={**os.environ, "PYTHONPATH": f"{CHECKOUT / 'connector'}:{CHECKOUT}", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and return its answer; an error on the other side fails the test with its traceback."""
        self.send(**command)
        return self.answer()

    def send(self, **command: Any) -> None:
        """Send a command; `answer` waits for what it answers."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the next answer."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait(10)}; see {self.log}: {self.log.read_text()[-2000:]}"
        answer: dict[str, Any] = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer

    def stop(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()
