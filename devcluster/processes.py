"""Processes of the cluster: started apart from the command, found again by a record, ended only when surely ours.

A pid alone says nothing: it may have been given to another program since. A record therefore also holds the kernel's
start time of the process and the id of the boot, and a process counts as ours only while all three agree.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from devcluster.files import read_json, write_text
from devcluster.shell import child_environment

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """What identifies a process that we started."""

    name: str
    pid: int
    start_ticks: int  # field 22 of /proc/PID/stat: clock ticks between boot and the start of the process
    boot_id: str
    digest: str  # of everything that the process was started with
    argv: tuple[str, ...]

    def to_json(self) -> str:
        """The record as it is stored."""
        return json.dumps(asdict(self), indent=2) + "\n"


def boot_id() -> str:
    """The kernel's id of this boot of the machine."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def parse_stat(stat: str) -> tuple[str, int, int]:
    """State letter, number of threads and start time in clock ticks from the text of /proc/PID/stat.

    The program's name stands in parentheses and may itself hold some, so fields count from the last one.
    """
    fields = stat[stat.rindex(")") + 1 :].split()
    return fields[0], int(fields[17]), int(fields[19])


def start_ticks(pid: int) -> int | None:
    """The start time of a living process in clock ticks since boot; None for no process and for a zombie.

    The state is that of the first thread, which a signal may end before the others. The last thread closes the
    process's files, so until then its ports are taken.
    """
    try:
        state, num_threads, ticks = parse_stat((_PROC / str(pid) / "stat").read_text())
    except (OSError, ValueError, IndexError):
        return None
    return None if state == "X" or (state == "Z" and num_threads < 2) else ticks


def command_line(pid: int) -> list[str]:
    """The arguments of a process; empty when it is gone."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def all_pids() -> list[int]:
    """Every process on the machine."""
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]


def is_alive(record: ProcessRecord) -> bool:
    """Whether the recorded process still runs and is the very same one."""
    return record.boot_id == boot_id() and start_ticks(record.pid) == record.start_ticks


def load_records(folder: Path) -> dict[str, ProcessRecord]:
    """All records in a folder, by component. A damaged file counts as none."""
    records: dict[str, ProcessRecord] = {}
    for path in sorted(folder.glob("*.json")):
        fields = read_json(path)
        with contextlib.suppress(TypeError, KeyError):
            record = ProcessRecord(**((fields or {}) | {"argv": tuple((fields or {})["argv"])}))
            records[record.name] = record
    return records


def start(
    name: str, argv: Sequence[str], digest: str, log_file: Path, records: Path, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a component in a session of its own, with its output in a file, and record it."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=child_environment(env, proxies=False),
            cwd="/",
            start_new_session=True,
        )
    ticks = start_ticks(process.pid)
    record = ProcessRecord(name, process.pid, -1 if ticks is None else ticks, boot_id(), digest, tuple(argv))
    write_text(records / f"{name}.json", record.to_json())
    return process


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def interrupt(record: ProcessRecord, grace_s: float) -> None:
    """Send SIGINT to a recorded process and wait for its end, for at most ``grace_s`` seconds."""
    deadline = time.monotonic() + grace_s
    if is_alive(record):
        _signal([record.pid], signal.SIGINT)
    while is_alive(record) and time.monotonic() < deadline:
        _reap()
        time.sleep(0.05)


def stop(records: Iterable[ProcessRecord], grace_s: float) -> None:
    """End recorded processes: SIGTERM, then SIGKILL for those still there after ``grace_s`` seconds."""
    targets = [record for record in records if is_alive(record)]
    _signal([record.pid for record in targets], signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while (left := [record for record in targets if is_alive(record)]) and time.monotonic() < deadline:
        _reap()
        time.sleep(0.05)
    _signal([record.pid for record in left], signal.SIGKILL)
    while any(is_alive(record) for record in left):
        _reap()
        time.sleep(0.02)


def _reap() -> None:
    """Collect our own children that have ended, as in an `up` that restarts what it started itself."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def kill_all(pids: Iterable[int], timeout_s: float = 10) -> list[int]:
    """SIGKILL processes and wait until they are gone. Returns those that would not go (stuck in the kernel)."""
    waiting = {pid: ticks for pid in pids if (ticks := start_ticks(pid)) is not None}
    deadline = time.monotonic() + timeout_s
    while waiting and time.monotonic() < deadline:
        _signal(waiting, signal.SIGKILL)
        time.sleep(0.02)
        waiting = {pid: ticks for pid, ticks in waiting.items() if start_ticks(pid) == ticks}
    return sorted(waiting)
