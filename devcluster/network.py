"""The pod bridge, the kernel settings that Services need, and the iptables chains that kube-proxy leaves behind."""

import contextlib
import ipaddress
import itertools
import json
from collections.abc import Iterable
from pathlib import Path

from devcluster.errors import DevClusterError
from devcluster.files import read_json, write_text
from devcluster.settings import BRIDGE, GATEWAY, GATEWAY_PREFIX_LENGTH
from devcluster.shell import find_program, run, succeeds

_SYSCTL = Path("/proc/sys")
# What the bridge, kubelet and kube-proxy change; `down` puts the old values back.
TOUCHED_SETTINGS = (
    "net/ipv4/ip_forward",
    "net/ipv4/conf/all/route_localnet",
    "net/bridge/bridge-nf-call-iptables",
    "net/bridge/bridge-nf-call-ip6tables",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
_OUR_CHAINS = ("KUBE-", "CNI-")
_TABLES = ("mangle", "nat", "filter")


def save_kernel_settings(path: Path) -> None:
    """Remember the machine's values, once per cluster."""
    if path.exists():
        return
    values = {}
    for name in TOUCHED_SETTINGS:
        with contextlib.suppress(OSError):
            values[name] = (_SYSCTL / name).read_text().strip()
    write_text(path, json.dumps(values, indent=2) + "\n")


def restore_kernel_settings(path: Path) -> None:
    """Put remembered values back."""
    for name, value in (read_json(path) or {}).items():
        setting = _SYSCTL / name
        with contextlib.suppress(OSError):
            if name in TOUCHED_SETTINGS and setting.read_text().strip() != value:
                setting.write_text(value)


def prepare_kernel() -> bool:
    """Turn forwarding on. Returns whether iptables sees packets between two ports of one bridge."""
    (_SYSCTL / "net/ipv4/ip_forward").write_text("1")
    filtered = _SYSCTL / "net/bridge/bridge-nf-call-iptables"
    if not filtered.exists() and find_program("modprobe"):
        succeeds(["modprobe", "br_netfilter"])
    try:
        filtered.write_text("1")
    except OSError:
        return False
    return True


def bridge_owner() -> Path | None:
    """The state folder of the cluster that made the bridge; None when there is no bridge, or none of ours."""
    try:
        alias = Path(f"/sys/class/net/{BRIDGE}/ifalias").read_text().strip()
    except OSError:
        return None
    return Path(alias) if alias.startswith("/") else None


def ensure_bridge(owner: Path) -> None:
    """The bridge with its address. It exists before the first pod, because the API server listens on it.

    Args:
        owner: the cluster's state folder. It becomes the bridge's alias: the mark of the one cluster of this machine.
    """
    if not succeeds(["ip", "link", "show", "dev", BRIDGE]):
        run(["ip", "link", "add", "name", BRIDGE, "type", "bridge"], what=f"making the bridge {BRIDGE}")
    addresses = run(["ip", "-o", "-4", "addr", "show", "dev", BRIDGE], what=f"reading the addresses of {BRIDGE}")
    if f" {GATEWAY}/" not in addresses:
        address = f"{GATEWAY}/{GATEWAY_PREFIX_LENGTH}"
        run(["ip", "addr", "add", address, "dev", BRIDGE], what=f"giving {BRIDGE} its address")
    run(["ip", "link", "set", "dev", BRIDGE, "alias", str(owner), "up"], what=f"bringing {BRIDGE} up")


def remove_bridge() -> None:
    """Delete the bridge and the host ends of the pods' veth pairs."""
    if not succeeds(["ip", "link", "show", "dev", BRIDGE]):
        return
    listing = run(["ip", "-o", "link", "show", "master", BRIDGE], what=f"listing the ports of {BRIDGE}")
    for name in port_names(listing):
        succeeds(["ip", "link", "delete", "dev", name])
    succeeds(["ip", "link", "delete", "dev", BRIDGE])


def port_names(listing: str) -> list[str]:
    """Device names in the output of ``ip -o link show master BRIDGE``: "7: veth0a@if3: <...>" names veth0a."""
    return [line.split(":")[1].split("@")[0].strip() for line in listing.splitlines() if line.count(":") > 1]


def removal_script(saved: str) -> str:
    """From the output of ``iptables-save``, the input of ``iptables-restore --noflush`` that removes our chains.

    Rules of other chains that jump into ours go first, then our chains are emptied, then deleted.
    """
    script: list[str] = []
    for table, lines in _by_table(saved).items():
        chains = [line[1:].split()[0] for line in lines if line.startswith(":") and _is_ours(line[1:])]
        jumps = [line for line in lines if line.startswith("-A ") and not _is_ours(line[3:]) and _jumps_to_ours(line)]
        if chains or jumps:
            script += [f"*{table}", *(f"-D{line[2:]}" for line in jumps)]
            script += [f"-F {chain}" for chain in chains] + [f"-X {chain}" for chain in chains] + ["COMMIT"]
    return "".join(f"{line}\n" for line in script)


def _by_table(saved: str) -> dict[str, list[str]]:
    tables: dict[str, list[str]] = {}
    current: list[str] = []
    for line in saved.splitlines():
        if line.startswith("*"):
            current = tables.setdefault(line[1:].strip(), [])
        else:
            current.append(line)
    return tables


def _is_ours(text: str) -> bool:
    return text.startswith(_OUR_CHAINS)


def _jumps_to_ours(rule: str) -> bool:
    words = rule.split()
    return any(flag in ("-j", "-g") and _is_ours(target) for flag, target in itertools.pairwise(words))


def leftover_chains() -> list[str]:
    """Our chains that iptables still holds, for IPv4 and IPv6."""
    return [
        line[1:].split()[0]
        for program in ("iptables-save", "ip6tables-save")
        for line in _saved(program).splitlines()
        if line.startswith(":") and _is_ours(line[1:])
    ]


def remove_chains() -> None:
    """Remove the chains of kube-proxy, the kubelet and the portmap plugin."""
    for program in ("iptables", "ip6tables"):
        script = removal_script(_saved(f"{program}-save"))
        if script:
            run([f"{program}-restore", "--noflush"], stdin=script, what="removing the chains of kube-proxy")


def _saved(program: str) -> str:
    if not find_program(program):
        return ""
    try:
        return run([program], what="reading the iptables rules")
    except DevClusterError:
        return ""  # a kernel without that family has no rules to remove


def colliding_addresses(listing: Iterable[dict[str, object]], networks: Iterable[str]) -> list[str]:
    """Addresses of other devices inside our networks, as in "10.244.0.9 on eth1".

    Args:
        listing: the output of ``ip -j addr``, decoded.
        networks: our networks in CIDR notation.
    """
    ours = [ipaddress.ip_network(network) for network in networks]
    found = []
    for device in listing:
        for address in device.get("addr_info", []):  # type: ignore[union-attr]
            if device.get("ifname") == BRIDGE or address.get("family") != "inet":
                continue
            local = ipaddress.ip_address(address["local"])
            if any(local in network for network in ours):
                found.append(f"{local} on {device['ifname']}")
    return found
