"""A process and all that it starts, as one thing that can be waited for and ended without a trace."""

import http.client
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

__all__ = ["ProcessGroup", "ProcessGroupError"]

_TERM_GRACE_S = 15.0


class ProcessGroupError(Exception):
    """The process ended or did not serve in time; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """A process that leads a group of its own."""

    process: subprocess.Popen[bytes]
    log_file: Path
    scratch: Path  # its TMPDIR: sockets and the like, deleted with it

    @classmethod
    def start(cls, command: Sequence[str], environment: Mapping[str, str], log_file: Path) -> "ProcessGroup":
        """Start a program in a group of its own, with a TMPDIR of its own; its output goes to the log file."""
        # Not below pytest's folder: paths of Unix sockets may have 107 characters.
        scratch = Path(tempfile.mkdtemp(prefix="dcp-engine-"))
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                command,
                env={**environment, "TMPDIR": str(scratch)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(process, log_file, scratch)

    def wait_for_http(self, url: str, timeout_s: float) -> None:
        """Return when a GET of the URL answers 200."""
        address = urlsplit(url)
        deadline = time.monotonic() + timeout_s
        last = "nothing listens"
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ProcessGroupError(f"the engine ended with {self.process.returncode}.\n{self.tail()}")
            connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=5)
            try:
                connection.request("GET", address.path)
                response = connection.getresponse()
                if response.status == 200:
                    return
                last = f"{response.status} {response.read().decode(errors='replace')[:200]}"
            except OSError as error:
                last = str(error)
            finally:
                connection.close()
            time.sleep(0.2)
        raise ProcessGroupError(f"{url} did not answer 200 within {timeout_s:.0f} s: {last}.\n{self.tail()}")

    def members(self) -> list[int]:
        """Return the living processes of the group."""
        return [pid for pid in _pids() if _group_if_alive(pid) == self.process.pid]

    def tail(self, lines: int = 40) -> str:
        """Return the end of the log."""
        kept = self.log_file.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join([f"The end of {self.log_file}:", *kept])

    def signal(self, number: int) -> None:
        """Send a signal to every process of the group."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return

    def stop(self) -> None:
        """End the group, and remove its TMPDIR and what it left in /dev/shm.

        SIGTERM goes to the leader alone, as it would in a pod: the engine then ends its workers in its own order.
        """
        # vLLM leaves the shared memory of its tensor-parallel ranks behind however it ends.
        shared = {path for pid in self.members() for path in _shared_memory(pid)}
        self.process.terminate()
        deadline = time.monotonic() + _TERM_GRACE_S
        while self._alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        while self._alive():
            self.signal(signal.SIGKILL)
            time.sleep(0.05)
        # It may have ended right after it was looked at.
        self.process.wait()
        for path in shared:
            path.unlink(missing_ok=True)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _alive(self) -> bool:
        self.process.poll()  # reaps the leader, whose zombie would count as a member
        return bool(self.members())


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _group_if_alive(pid: int) -> int | None:
    try:
        # After the name in brackets, which may hold spaces: state, parent, process group.
        state, _, group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
    except OSError:
        return None
    return None if state == "Z" else int(group)


def _shared_memory(pid: int) -> set[Path]:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    names = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/dev/shm/" in line}
    return {Path(name) for name in names if not name.endswith("(deleted)")}
