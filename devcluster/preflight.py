"""Checks before anything is changed: each failure is one sentence that says what is missing."""

import contextlib
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from devcluster import cgroups, network, processes
from devcluster.errors import DevClusterError
from devcluster.paths import Cache
from devcluster.settings import POD_SUBNET, PORTS, SERVICE_SUBNET, Port
from devcluster.shell import find_program, run, succeeds

# sockaddr_un.sun_path holds 108 bytes with the final zero; this is our longest socket below the cache.
_LONGEST_SOCKET = "cluster/containerd/containerd.sock.ttrpc"
_SOCKET_PATH_LIMIT = 107
_LISTEN = "0A"  # the kernel's number for the state of a listening socket
_PORT_PATIENCE_S = 3.0


def check_machine(cache: Cache) -> None:
    """Refuse a machine on which the cluster can't run at all."""
    if not sys.platform.startswith("linux"):
        raise DevClusterError(f"the local cluster needs Linux, and this is {platform.system()}")
    if platform.machine() not in ("x86_64", "amd64"):
        raise DevClusterError(f"the local cluster needs an x86-64 machine, and this is {platform.machine()}")
    if os.geteuid() != 0:
        raise DevClusterError("the local cluster needs root for mounts, cgroups and network devices: use sudo")
    longest = len(str(cache.root / _LONGEST_SOCKET).encode())
    if longest > _SOCKET_PATH_LIMIT:
        raise DevClusterError(
            f"the path of the cache folder {cache.root} is too long by {longest - _SOCKET_PATH_LIMIT} characters "
            "for the sockets in it: set DCP_DISAGG_CACHE to a shorter one"
        )


def check_kernel(scratch: Path) -> None:
    """Refuse a kernel without cgroups, overlayfs or iptables. ``scratch`` is an existing folder on the cache's disk."""
    if missing := cgroups.missing_controllers():
        raise DevClusterError(f"the cgroup controllers {', '.join(missing)} are not available below /sys/fs/cgroup")
    if not _overlay_works(scratch):
        raise DevClusterError(
            f"overlayfs can't be mounted in {scratch}: containers need it; use a cache folder on ext4 or xfs"
        )
    if not find_program("iptables") or not succeeds(["iptables", "-w", "5", "-t", "nat", "-S"]):
        raise DevClusterError("iptables does not work here (`iptables -t nat -S` fails): Services need its nat table")


def _overlay_works(scratch: Path) -> bool:
    probe = scratch / "overlay-probe"
    folders = {name: probe / name for name in ("lower", "upper", "work", "merged")}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    options = f"lowerdir={folders['lower']},upperdir={folders['upper']},workdir={folders['work']}"
    works = succeeds(["mount", "-t", "overlay", "overlay", "-o", options, folders["merged"]])
    if works:
        succeeds(["umount", folders["merged"]])
    shutil.rmtree(probe, ignore_errors=True)
    return works


def check_addresses() -> None:
    """Refuse when another network device has an address in our networks."""
    listing = json.loads(run(["ip", "-j", "addr"], what="listing the machine's addresses") or "[]")
    if found := network.colliding_addresses(listing, (POD_SUBNET, SERVICE_SUBNET)):
        raise DevClusterError(
            f"the local cluster uses {POD_SUBNET} and {SERVICE_SUBNET}, and this machine already has {', '.join(found)}"
        )


def disk_message(needed_bytes: int, available_bytes: int, folder: Path) -> str:
    """The sentence for a disk that is too full; "" when there is room."""
    if needed_bytes <= available_bytes:
        return ""
    return (
        f"the disk of {folder} is too full: {needed_bytes / 1e9:.1f} GB are needed and {available_bytes / 1e9:.1f} GB "
        "are free; free some, or set DCP_DISAGG_CACHE to a folder on another disk"
    )


def check_disk(folder: Path, needed_bytes: int) -> None:
    """Refuse when the disk has less free space than the missing parts need."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if message := disk_message(needed_bytes, shutil.disk_usage(existing).free, folder):
        raise DevClusterError(message)


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket: address as text ("" for all addresses), port, and the kernel's inode of the socket."""

    address: str
    port: int
    inode: int


def parse_listeners(table: str, *, ipv6: bool) -> list[Listener]:
    """Listening sockets in the text of /proc/net/tcp or tcp6.

    The kernel writes an IPv4 address as a native-endian hexadecimal number. Of IPv6 only "all addresses" matters here:
    such a socket usually takes IPv4 connections too.
    """
    found = []
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10 or fields[3] != _LISTEN:
            continue
        raw, port = fields[1].rsplit(":", 1)
        if set(raw) == {"0"}:
            address = ""
        elif ipv6:
            continue
        else:
            address = ".".join(str(byte) for byte in int(raw, 16).to_bytes(4, sys.byteorder))
        found.append(Listener(address, int(port, 16), int(fields[9])))
    return found


def taken_ports(ports: Iterable[Port], listeners: Iterable[Listener]) -> list[tuple[Port, Listener]]:
    """Ports of ours that somebody else holds."""
    by_port: dict[int, list[Listener]] = {}
    for listener in listeners:
        by_port.setdefault(listener.port, []).append(listener)
    return [
        (port, listener)
        for port in ports
        for listener in by_port.get(port.number, [])
        if listener.address in ("", port.address)
    ]


def check_ports(components: Iterable[str]) -> None:
    """Refuse when a port of a component that is about to start is taken; the message says by whom."""
    names = set(components)
    wanted = [port for port in PORTS if port.component in names]
    deadline = time.monotonic() + _PORT_PATIENCE_S
    # A process that was just killed may hold its sockets for a moment after it is gone from the list.
    while (taken := taken_ports(wanted, _listeners())) and time.monotonic() < deadline:
        time.sleep(0.1)
    if taken:
        port, listener = taken[0]
        raise DevClusterError(
            f"port {port.number} on {port.address}, which {port.component} needs, is taken by {_holder(listener.inode)}"
        )


def _listeners() -> list[Listener]:
    found = parse_listeners(Path("/proc/net/tcp").read_text(), ipv6=False)
    with contextlib.suppress(OSError):  # a kernel without IPv6
        found += parse_listeners(Path("/proc/net/tcp6").read_text(), ipv6=True)
    return found


def _holder(inode: int) -> str:
    wanted = f"socket:[{inode}]"
    for pid in processes.all_pids():
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                if os.readlink(descriptor) == wanted:  # noqa: PTH115 - the target is no path
                    return f"process {pid}: {' '.join(processes.command_line(pid))[:200]}"
    return "a process that can't be seen from here"
