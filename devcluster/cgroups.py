"""The cgroup below which all pods run, for cgroup v1 and v2, and the way to end everything in it."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from devcluster.errors import DevClusterError
from devcluster.processes import kill_all
from devcluster.settings import CGROUP

_ROOT = Path("/sys/fs/cgroup")
_NEEDED = ("cpu", "cpuset", "memory", "pids")


def is_v2(root: Path = _ROOT) -> bool:
    """Whether the machine has the unified hierarchy at the usual place."""
    return (root / "cgroup.controllers").exists()


def hierarchies(root: Path = _ROOT) -> list[Path]:
    """The mounted hierarchies: one on v2, one per controller on v1."""
    if is_v2(root):
        return [root]
    candidates = (
        sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink()) if root.is_dir() else []
    )
    return [path for path in candidates if (path / "cgroup.procs").exists()]


def missing_controllers(root: Path = _ROOT) -> list[str]:
    """Controllers that Kubernetes needs and the machine lacks."""
    if is_v2(root):
        present = set((root / "cgroup.controllers").read_text().split())
    else:
        present = {name for path in root.iterdir() for name in path.name.split(",")} if root.is_dir() else set()
    return [name for name in _NEEDED if name not in present]


def prepare(root: Path = _ROOT) -> None:
    """Make our cgroup in every hierarchy, able to limit what is below it."""
    try:
        if is_v2(root):
            _delegate(root)
        for hierarchy in hierarchies(root):
            ours = hierarchy / CGROUP
            ours.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):
                # On v1 a new cpuset is empty and holds no process until it is given CPUs and memory.
                if not is_v2(root) and (ours / name).exists() and not (ours / name).read_text().strip():
                    (ours / name).write_text((hierarchy / name).read_text())
        if is_v2(root):
            _delegate(root / CGROUP)
    except OSError as error:
        raise DevClusterError(
            f"the cgroup {CGROUP} can't be set up below {root}: Kubernetes must be able to write there ({error})"
        ) from error


def _delegate(folder: Path) -> None:
    enabled = set((folder / "cgroup.subtree_control").read_text().split())
    available = set((folder / "cgroup.controllers").read_text().split())
    missing = [f"+{name}" for name in (*_NEEDED, "hugetlb", "io") if name in available - enabled]
    if missing:
        (folder / "cgroup.subtree_control").write_text(" ".join(missing))


def _deepest_first(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        for child in folder.iterdir():
            if child.is_dir():
                yield from _deepest_first(child)
        yield folder


def _pids(root: Path) -> set[int]:
    pids = set()
    for hierarchy in hierarchies(root):
        for folder in _deepest_first(hierarchy / CGROUP):
            with contextlib.suppress(OSError):
                pids |= {int(line) for line in (folder / "cgroup.procs").read_text().split()}
    return pids


def end_pods(root: Path = _ROOT) -> list[int]:
    """Kill every process below our cgroup. Returns those that would not go."""
    stuck: list[int] = []
    for _ in range(5):  # a process may fork while the list is read
        pids = _pids(root)
        if not pids:
            return []
        stuck = kill_all(pids)
    return stuck


def remove(root: Path = _ROOT, timeout_s: float = 5) -> list[Path]:
    """Delete our cgroup everywhere. Returns the folders that the kernel would not let go."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = []
        for hierarchy in hierarchies(root):
            for folder in _deepest_first(hierarchy / CGROUP):
                try:
                    folder.rmdir()
                except OSError:
                    left.append(folder)
        # A killed process leaves its cgroup a moment after it is gone.
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)
