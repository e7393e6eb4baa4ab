"""What containerd reads: its configuration, the pod network, and the runtime that lends pods the host's libraries."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from devcluster.paths import ClusterPaths
from devcluster.settings import (
    BRIDGE,
    ENGINE_MOUNT,
    ENGINE_RUNTIME,
    MODELS_MOUNT,
    NETWORK_NAME,
    PAUSE_IMAGE,
    POD_SUBNET,
)

_LIBRARY_FOLDERS = ("/usr", "/lib", "/lib64", "/bin", "/sbin")
# Debian's dynamic linker and its BLAS find their libraries through these.
_LIBRARY_INDEXES = ("/etc/ld.so.cache", "/etc/alternatives")
_CRI = '"io.containerd.grpc.v1.cri"'


def render_config(paths: ClusterPaths, cni_binaries: Path, base_spec: Path) -> str:
    """containerd's configuration: everything that it keeps lies below the cluster's folder."""
    root = paths.containerd
    runtimes = f"plugins.{_CRI}.containerd.runtimes"
    return f"""version = 2
root = {json.dumps(str(root / "root"))}
state = {json.dumps(str(root / "state"))}
# Snapshotters that need other file systems, and plugins that would write outside of the two folders above.
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.internal.v1.opt", "io.containerd.tracing.processor.v1.otlp",
]

[grpc]
  address = {json.dumps(str(paths.containerd_socket))}

[plugins.{_CRI}]
  sandbox_image = "{PAUSE_IMAGE}"
  enable_selinux = false
  disable_apparmor = true
  # Without CAP_SYS_RESOURCE the runtime could not lower the score and would end with "can't get final child's PID".
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  stream_server_address = "127.0.0.1"

[plugins.{_CRI}.cni]
  bin_dir = {json.dumps(str(cni_binaries))}
  conf_dir = {json.dumps(str(paths.cni / "conf"))}

[plugins.{_CRI}.containerd]
  default_runtime_name = "runc"

[{runtimes}.runc]
  runtime_type = "io.containerd.runc.v2"
[{runtimes}.runc.options]
  Root = {json.dumps(str(root / "runc"))}
  SystemdCgroup = false

[{runtimes}.{ENGINE_RUNTIME}]
  runtime_type = "io.containerd.runc.v2"
  base_runtime_spec = {json.dumps(str(base_spec))}
[{runtimes}.{ENGINE_RUNTIME}.options]
  Root = {json.dumps(str(root / "runc"))}
  SystemdCgroup = false
"""


def render_network(paths: ClusterPaths) -> str:
    """The pod network: a bridge on this machine. Addresses are leased from files below the cluster's folder."""
    bridge = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "hairpinMode": True,
        "ipMasq": False,
        "ipam": {
            "type": "host-local",
            "dataDir": str(paths.cni / "leases"),
            "ranges": [[{"subnet": POD_SUBNET}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    document = {
        "cniVersion": "1.0.0",
        "name": NETWORK_NAME,
        "plugins": [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}],
    }
    return json.dumps(document, indent=2) + "\n"


def engine_mounts(environment: Path | None, base_prefix: Path | None, models: Path) -> tuple[tuple[str, str], ...]:
    """(source, destination) of the read-only mounts that turn a nearly empty image into a vLLM one.

    Args:
        environment: the engines' virtual environment; None while there is none.
        base_prefix: the prefix of the interpreter that the environment's python is a link to.
        models: the folder of tiny models.
    """
    mounts = [(folder, folder) for folder in (*_LIBRARY_FOLDERS, *_LIBRARY_INDEXES)]
    if base_prefix is not None and not base_prefix.is_relative_to("/usr"):
        mounts.append((str(base_prefix), str(base_prefix)))
    if environment is not None:
        # At its own path too: scripts in its bin folder name that path in their first line.
        mounts += [(str(environment), str(environment)), (str(environment), ENGINE_MOUNT)]
    mounts.append((str(models), MODELS_MOUNT))
    return tuple(mounts)


def render_base_spec(default_spec: dict[str, Any], mounts: Iterable[tuple[str, str]]) -> str:
    """containerd's default OCI spec with read-only bind mounts added, for the runtime of the CPU engines."""
    bound = [
        {"destination": target, "type": "bind", "source": source, "options": ["rbind", "ro", "nosuid", "nodev"]}
        for source, target in mounts
    ]
    spec = default_spec | {"mounts": [*default_spec["mounts"], *bound]}
    # The default lowers open files to 1024. Without a limit of its own a container has that of containerd, like any
    # other pod; a higher one would need CAP_SYS_RESOURCE.
    spec["process"] = {name: value for name, value in spec["process"].items() if name != "rlimits"}
    return json.dumps(spec, indent=1) + "\n"


def present(mounts: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The mounts whose source exists on this machine."""
    return [(source, target) for source, target in mounts if os.path.exists(source)]  # noqa: PTH110 - plain strings
