"""Removes a cluster, alive or dead: processes, containers, mounts, network, and every file outside of the cache."""

import contextlib
import json
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from devcluster import cgroups, network, processes
from devcluster.components import NAMES
from devcluster.errors import DevClusterError
from devcluster.paths import ClusterPaths
from devcluster.progress import Log
from devcluster.settings import NETWORK_NAME
from devcluster.shell import succeeds

_SHIM_SOCKETS = Path("/run/containerd/s")
_CNI_RESULTS = Path("/var/lib/cni/results")
_CONTAINER_LOGS = Path("/var/log/containers")
_DEVICE_PLUGINS = Path("/var/lib/kubelet/device-plugins")
# Programs of ours may write nowhere else, and yet these paths are built into them. A folder goes when it is empty.
_FOLDERS_OUTSIDE = (
    "/run/containerd/s",
    "/run/containerd/fifo",
    "/run/containerd",
    "/var/lib/cni/results",
    "/var/lib/cni/networks",
    "/var/lib/cni",
    "/var/log/containers",
    "/var/lib/kubelet/device-plugins",
    "/var/lib/kubelet",
)


def remove_cluster(paths: ClusterPaths, log: Log) -> None:
    """Remove everything of the cluster whose state is in ``paths``; nothing there is fine.

    Raises:
        DevClusterError: something would not go; the message names it.
    """
    # Pods, bridge and chains are one set per machine, and may be those of a cluster with another cache.
    machine_is_ours = network.bridge_owner() in (None, paths.root)
    _stop_components(paths)
    stuck = cgroups.end_pods() if machine_is_ours else []
    stuck += processes.kill_all(_runtime_processes(paths))
    log("processes and containers are gone")
    unmount_below(paths.root)
    left: list[Path] = []
    if machine_is_ours:
        network.remove_bridge()
        network.remove_chains()
        network.restore_kernel_settings(paths.root / "kernel-settings.json")
        left = cgroups.remove()
    remove_files_outside(paths)
    _remove_tree(paths.root)
    log("mounts, bridge, iptables chains, cgroups and state files are gone")
    if stuck or left:
        what = [f"process {pid}" for pid in stuck] + [f"cgroup {folder}" for folder in left]
        raise DevClusterError(f"the kernel would not let go of {', '.join(what)}; a restart of the machine clears that")


def _stop_components(paths: ClusterPaths) -> None:
    records = processes.load_records(paths.records)
    # The kubelet first: it would start again what is killed below. The store last: the others write to it as they end.
    for name in (*reversed(NAMES), *(name for name in records if name not in NAMES)):
        if name in records:
            processes.stop([records[name]], grace_s=0 if name == "kubelet" else 3)


def _runtime_processes(paths: ClusterPaths) -> list[int]:
    """Shims of our containerd, and any program of ours without a record: its arguments name our folder."""
    found = []
    for pid in processes.all_pids():
        argv = processes.command_line(pid)
        if argv and is_runtime_process(argv, paths):
            found.append(pid)
    return found


def is_runtime_process(argv: list[str], paths: ClusterPaths) -> bool:
    """Whether a command line is of a shim, a runc or a component that works for the cluster in ``paths``."""
    program = Path(argv[0]).name
    if program.startswith("containerd-shim"):
        return str(paths.containerd_socket) in argv
    return program in {*NAMES, "runc"} and any(_below(argument, paths.root) for argument in argv[1:])


def _below(argument: str, folder: Path) -> bool:
    value = argument.split("=", 1)[1] if argument.startswith("--") and "=" in argument else argument
    return value.startswith("/") and Path(value).is_relative_to(folder)


def mount_points(mountinfo: str, folder: Path) -> list[str]:
    """Mount points at or below a folder in the text of /proc/self/mountinfo, innermost and latest first."""
    points = []
    for line in mountinfo.splitlines():
        # The kernel writes blanks in paths as octal escapes.
        point = line.split(" ")[4].encode().decode("unicode_escape")
        if Path(point).is_relative_to(folder):
            points.append(point)
    return points[::-1]


def unmount_below(folder: Path) -> None:
    """Unmount everything at or below a folder."""
    for _ in range(3):  # a mount may hide others of the same path
        points = mount_points(Path("/proc/self/mountinfo").read_text(), folder)
        for point in points:
            succeeds(["umount", "--lazy", "--no-canonicalize", point])
        if not points:
            return


def listening_sockets(proc_net_unix: str) -> set[str]:
    """Paths of unix sockets that somebody holds open, from the text of /proc/net/unix."""
    return {line.split(" ")[-1] for line in proc_net_unix.splitlines() if line.split(" ")[-1].startswith("/")}


def remove_files_outside(paths: ClusterPaths) -> None:
    """Remove what our programs wrote at paths that are built into them."""
    _unlink(path for path in files_outside(paths))
    for folder in _FOLDERS_OUTSIDE:
        with contextlib.suppress(OSError):  # not empty, so not only ours, or not there
            Path(folder).rmdir()


def files_outside(paths: ClusterPaths) -> list[Path]:
    """Files of ours at paths that are built into our programs, as they are now."""
    held = listening_sockets(Path("/proc/net/unix").read_text())
    found = [path for path in _children(_SHIM_SOCKETS) if str(path) not in held]
    found += [path for path in _children(_CNI_RESULTS) if _is_result_of_ours(path, paths.root)]
    found += [path for path in _children(_CONTAINER_LOGS) if _points_below(path, paths.root)]
    socket = _DEVICE_PLUGINS / "kubelet.sock"
    if str(socket) not in held:
        found += [path for path in _children(_DEVICE_PLUGINS) if path.name in (socket.name, "DEPRECATION")]
        found += [path for path in _children(_DEVICE_PLUGINS) if path.name == "kubelet_internal_checkpoint"]
    return found


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def is_result_of_ours(text: str, root: Path) -> bool:
    """Whether a cached result of a network plugin belongs to a pod of the cluster in ``root``.

    Results for our network carry its name; those for a pod's loopback device only the path of the pod's namespace.
    """
    try:
        if json.loads(text).get("networkName") == NETWORK_NAME:
            return True
    except (ValueError, AttributeError):
        pass
    return f'"{root}/' in text


def _is_result_of_ours(path: Path, root: Path) -> bool:
    try:
        return is_result_of_ours(path.read_text(errors="replace"), root)
    except OSError:
        return False


def _points_below(path: Path, folder: Path) -> bool:
    return path.is_symlink() and path.readlink().is_relative_to(folder)


def _unlink(files: Iterable[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)


def _remove_tree(folder: Path) -> None:
    """Delete a folder, in which the last writes of dying processes may still land."""
    for _ in range(20):
        # Never through a mount: a pod's volume may be a folder of the host.
        if points := mount_points(Path("/proc/self/mountinfo").read_text(), folder):
            raise DevClusterError(f"{points[0]} can't be unmounted, so {folder} is not deleted")
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)
    raise DevClusterError(f"{folder} can't be deleted")
