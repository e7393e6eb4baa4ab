"""Files that two commands may want at once: locks, and writes that are either whole or absent."""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from devcluster.errors import DevClusterError
from devcluster.progress import Log


def write_text(path: Path, text: str, mode: int = 0o644) -> bool:
    """Write a file by renaming a finished one into place. Returns whether the content changed."""
    if path.is_file() and path.read_text() == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.chmod(mode)
    partial.replace(path)
    return True


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None when the file is absent or was cut short."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


@contextlib.contextmanager
def locked(path: Path, log: Log, waiting_for: str) -> Generator[None]:
    """Hold an exclusive lock on a file; says so once when somebody else has it.

    The lock belongs to the open file, so it ends with the process however that ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            log(f"waiting for {waiting_for}: {file.read().strip() or 'another command'} is at it")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} in {Path.cwd()}")
        file.flush()
        yield


def ensure_folder(target: Path, fill: Callable[[Path], None], log: Log, what: str, lock: Path) -> bool:
    """Make a folder once, whole or not at all. Returns whether it had to be made.

    Args:
        target: the finished folder. It exists only with everything in it.
        fill: fills the empty folder that it is given; runs under the lock.
        log: progress lines.
        what: the content in words.
        lock: the lock file.
    """
    if target.is_dir():
        return False
    with locked(lock, log, what):
        if target.is_dir():
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        # Folders of attempts that were killed: nobody else can be writing them while we hold the lock.
        for leftover in target.parent.glob(f".{target.name}.*"):
            shutil.rmtree(leftover, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        partial.chmod(0o755)
        try:
            fill(partial)
            partial.rename(target)
        except OSError as error:
            raise DevClusterError(f"{what} could not be stored in {target}: {error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return True
