"""What the components of the local cluster read, and what is removed after them: texts in, texts out."""

import hashlib
import io
import json
import tarfile
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from devcluster import components, containerd, network, oci, pki, teardown, traces
from devcluster.paths import Cache, ClusterPaths
from devcluster.settings import CGROUP, ENGINE_RUNTIME, GATEWAY, PORTS

ROOT = Path("/cache/cluster")
PATHS = ClusterPaths(ROOT)
INSTALLED = components.Installed(
    kubernetes=Path("/cache/bin/kubernetes-1"),
    node=Path("/cache/bin/node-1"),
    containerd=Path("/usr/bin/containerd"),
    cgroup_v2=False,
    bridged_packets_filtered=True,
)
PLAN = components.plan(PATHS, INSTALLED, "{}")


def _component(name: str) -> components.Component:
    return next(component for component in PLAN if component.name == name)


def test_the_plan_holds_every_component_once_in_starting_order() -> None:
    assert tuple(component.name for component in PLAN) == components.NAMES


def test_every_path_that_a_component_is_given_lies_in_the_cache() -> None:
    allowed = (Path("/cache"), Path("/usr/bin/containerd"), Path(f"/{CGROUP}"))
    for component in PLAN:
        texts = [argument.partition("=")[2] or argument for argument in component.argv]
        for path, text in component.files.items():
            assert path.is_relative_to("/cache"), path
            texts += [word.strip("\"',[]").removeprefix("unix://") for word in text.split()]
        for text in texts:
            if text.startswith("/") and text != "/etc":
                assert any(Path(text).is_relative_to(folder) for folder in allowed), (component.name, text)


def test_every_port_is_given_to_the_component_that_owns_it() -> None:
    for port in PORTS:
        component = _component(port.component)
        everything = " ".join((*component.argv, *component.files.values()))
        assert str(port.number) in everything, port
        assert port.address in everything, port


def test_nothing_is_bound_to_all_addresses() -> None:
    for component in PLAN:
        assert "0.0.0.0:" not in " ".join((*component.argv, *component.files.values()))
        assert "=0.0.0.0" not in " ".join(component.argv)


@pytest.mark.parametrize("name", components.NAMES)
def test_a_digest_changes_with_arguments_and_files_and_with_nothing_else(name: str) -> None:
    component = _component(name)
    assert replace(component).digest == component.digest
    assert replace(component, argv=(*component.argv, "--v=2")).digest != component.digest
    assert replace(component, files={**component.files, Path("/cache/x"): ""}).digest != component.digest


def test_only_the_container_runtime_restarts_when_the_engines_mounts_change() -> None:
    other = components.plan(PATHS, INSTALLED, '{"mounts": []}')
    changed = [old.name for old, new in zip(PLAN, other, strict=True) if old.digest != new.digest]
    assert changed == ["containerd"]


@pytest.mark.parametrize(("cgroup_v2", "filtered"), [(True, True), (False, False)])
def test_the_kubelet_and_the_proxy_follow_the_machine(cgroup_v2: bool, filtered: bool) -> None:
    installed = replace(INSTALLED, cgroup_v2=cgroup_v2, bridged_packets_filtered=filtered)
    # A kubelet of 1.37 refuses cgroup v1 unless it is told otherwise.
    assert components.kubelet_config(PATHS, installed)["failCgroupV1"] is cgroup_v2
    proxy = components.proxy_config(PATHS, installed)
    assert proxy["iptables"]["masqueradeAll"] is not filtered  # type: ignore[index]


def test_containerds_configuration_is_toml_with_both_runtimes() -> None:
    config = tomllib.loads(containerd.render_config(PATHS, Path("/cni bin"), Path("/cache/cluster/config/spec.json")))
    cri = config["plugins"]["io.containerd.grpc.v1.cri"]
    assert cri["cni"]["bin_dir"] == "/cni bin"
    assert set(cri["containerd"]["runtimes"]) == {"runc", ENGINE_RUNTIME}
    assert cri["containerd"]["runtimes"][ENGINE_RUNTIME]["base_runtime_spec"].endswith("spec.json")


def test_the_pod_network_keeps_its_leases_in_the_cache() -> None:
    document = json.loads(containerd.render_network(PATHS))
    assert document["plugins"][0]["ipam"]["dataDir"] == "/cache/cluster/cni/leases"


@pytest.mark.parametrize(
    ("case", "environment", "prefix", "expected"),
    [
        ("no engine yet: libraries and models only", None, None, []),
        (
            "Debian's interpreter comes with /usr",
            Path("/cache/engine/k"),
            Path("/usr"),
            [("/cache/engine/k", "/cache/engine/k"), ("/cache/engine/k", "/opt/cpu-engine")],
        ),
        (
            "another interpreter's prefix is mounted at its own path",
            Path("/cache/engine/k"),
            Path("/home/u/python"),
            [
                ("/home/u/python", "/home/u/python"),
                ("/cache/engine/k", "/cache/engine/k"),
                ("/cache/engine/k", "/opt/cpu-engine"),
            ],
        ),
    ],
)
def test_engine_mounts(case: str, environment: Path | None, prefix: Path | None, expected: list) -> None:
    mounts = list(containerd.engine_mounts(environment, prefix, Path("/cache/models")))
    libraries = [mount for mount in mounts if mount[0] == mount[1] and mount[0].startswith(("/usr", "/lib", "/etc"))]
    assert len(libraries) == 5
    rest = [mount for mount in mounts if mount not in libraries and mount[0] not in ("/bin", "/sbin")]
    assert rest == [*expected, ("/cache/models", "/opt/cpu-engine-models")], case


def test_the_engines_runtime_spec_adds_read_only_mounts_and_lowers_no_limit() -> None:
    default = {"mounts": [{"destination": "/proc"}], "process": {"cwd": "/", "rlimits": [{"type": "RLIMIT_NOFILE"}]}}
    spec = json.loads(containerd.render_base_spec(default, [("/usr", "/usr")]))
    assert spec["process"] == {"cwd": "/"}
    assert [mount["destination"] for mount in spec["mounts"]] == ["/proc", "/usr"]
    assert "ro" in spec["mounts"][1]["options"]


def test_the_api_servers_certificate_covers_every_way_to_reach_it() -> None:
    text = pki.extensions(pki.SERVER)
    for name in (f"IP:{GATEWAY}", "IP:10.96.0.1", "IP:127.0.0.1", "DNS:kubernetes.default.svc"):
        assert name in text
    assert "serverAuth" in text
    assert "clientAuth" in pki.extensions(pki.ADMIN)
    assert "subjectAltName" not in pki.extensions(pki.ADMIN)


def test_the_kubelet_is_known_as_a_node() -> None:
    assert pki.subject(pki.KUBELET) == "/O=system:nodes/CN=system:node:dcp-node"
    assert pki.subject(pki.SCHEDULER) == "/CN=system:kube-scheduler"


def test_a_kubeconfig_verifies_the_server() -> None:
    document = yaml.safe_load(pki.kubeconfig("me", b"authority", b"certificate", b"key"))
    cluster = document["clusters"][0]["cluster"]
    assert cluster == {"server": f"https://{GATEWAY}:16443", "certificate-authority-data": "YXV0aG9yaXR5"}


def test_an_image_archive_is_addressed_by_its_content_and_the_same_each_time(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF")
    layer = oci.layer_of(("bin",), {"bin/program": program}, ("tmp",))
    archives = [tmp_path / "one.tar", tmp_path / "two.tar"]
    for archive in archives:
        oci.write_archive(archive, oci.ImageConfig("local.dev/x:1", entrypoint=("/bin/program",)), layer)
    assert archives[0].read_bytes() == archives[1].read_bytes()
    with tarfile.open(archives[0]) as archive:
        blobs = {name: archive.extractfile(name).read() for name in archive.getnames()}  # type: ignore[union-attr]
    for name, content in blobs.items():
        if name.startswith("blobs/"):
            assert name == f"blobs/sha256/{hashlib.sha256(content).hexdigest()}"
    manifest = json.loads(blobs[_blob(json.loads(blobs["index.json"])["manifests"][0])])
    config = json.loads(blobs[_blob(manifest["config"])])
    assert config["rootfs"]["diff_ids"] == [manifest["layers"][0]["digest"]]
    assert len(config["history"]) == 1
    with tarfile.open(fileobj=io.BytesIO(blobs[_blob(manifest["layers"][0])])) as content:
        assert {entry.name: oct(entry.mode) for entry in content} == {
            "bin": "0o755",
            "tmp": "0o1777",
            "bin/program": "0o755",
        }


def _blob(reference: dict) -> str:
    return f"blobs/{reference['digest'].replace(':', '/')}"


_SAVED = """# Generated by iptables-save
*nat
:PREROUTING ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
:CNI-HOSTPORT-DNAT - [0:0]
:DOCKER - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A PREROUTING -j DOCKER
-A POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-DNAT
-A KUBE-SERVICES -d 10.96.0.1/32 -j KUBE-POSTROUTING
COMMIT
*filter
:INPUT ACCEPT [0:0]
-A INPUT -m comment --comment "mentions KUBE-SERVICES only" -j ACCEPT
COMMIT
"""


def test_our_chains_go_and_everybody_elses_rules_stay() -> None:
    assert network.removal_script(_SAVED).splitlines() == [
        "*nat",
        '-D PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
        '-D POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-DNAT',
        "-F KUBE-SERVICES",
        "-F KUBE-POSTROUTING",
        "-F CNI-HOSTPORT-DNAT",
        "-X KUBE-SERVICES",
        "-X KUBE-POSTROUTING",
        "-X CNI-HOSTPORT-DNAT",
        "COMMIT",
    ]


def test_without_our_chains_there_is_nothing_to_remove() -> None:
    assert network.removal_script("*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -j ACCEPT\nCOMMIT\n") == ""


def test_the_ports_of_the_bridge_are_read_from_ips_listing() -> None:
    listing = "7: veth0a1b@if3: <BROADCAST,UP> mtu 1500 master dcpbr0\n9: veth9@if3: <UP> mtu 1500\n"
    assert network.port_names(listing) == ["veth0a1b", "veth9"]


def test_an_address_of_another_device_in_our_networks_is_found() -> None:
    listing = [
        {"ifname": "dcpbr0", "addr_info": [{"family": "inet", "local": "10.244.0.1"}]},
        {"ifname": "eth0", "addr_info": [{"family": "inet", "local": "192.0.2.2"}, {"family": "inet6", "local": "::"}]},
        {"ifname": "eth1", "addr_info": [{"family": "inet", "local": "10.96.3.4"}]},
    ]
    assert network.colliding_addresses(listing, ("10.244.0.0/24", "10.96.0.0/16")) == ["10.96.3.4 on eth1"]


def test_mounts_below_the_cluster_are_found_innermost_first_and_no_others() -> None:
    mountinfo = (
        "30 1 254:0 / / rw - ext4 /dev/vda rw\n"
        "31 30 254:0 /x /cache/cluster/kubelet rw - ext4 /dev/vda rw\n"
        "32 31 0:40 / /cache/cluster/kubelet/pods/a\\040b rw - tmpfs tmpfs rw\n"
        "33 30 0:41 / /cache/cluster-of-another rw - tmpfs tmpfs rw\n"
    )
    assert teardown.mount_points(mountinfo, ROOT) == ["/cache/cluster/kubelet/pods/a b", "/cache/cluster/kubelet"]


_SHIM = "/usr/bin/containerd-shim-runc-v2"


@pytest.mark.parametrize(
    ("case", "argv", "ours"),
    [
        ("our shim", [_SHIM, "-id", "x", "-address", str(PATHS.containerd_socket)], True),
        ("another containerd's shim", [_SHIM, "-id", "x", "-address", "/run/containerd/containerd.sock"], False),
        ("our etcd", ["/cache/bin/node-1/etcd", "--data-dir=/cache/cluster/etcd"], True),
        ("another etcd", ["etcd", "--data-dir=/var/lib/etcd"], False),
        ("a folder whose name starts like ours", ["etcd", "--data-dir=/cache/cluster2/etcd"], False),
        ("an editor with our file open", ["vim", "/cache/cluster/logs/etcd.log"], False),
        ("a process that is gone", [""], False),
    ],
)
def test_which_processes_belong_to_the_cluster(case: str, argv: list[str], ours: bool) -> None:
    assert teardown.is_runtime_process(argv, PATHS) is ours, case


@pytest.mark.parametrize(
    ("case", "text", "ours"),
    [
        ("a result for our network", '{"networkName": "dcp-disagg-pods"}', True),
        ("a loopback device of our pod", '{"networkName": "lo", "sandbox": "/cache/cluster/containerd/x"}', True),
        ("a loopback device of another pod", '{"networkName": "lo", "sandbox": "/run/netns/x"}', False),
        ("a folder whose name starts like ours", '{"sandbox": "/cache/cluster2/x"}', False),
        ("something else", "[]", False),
        ("a file cut short", '{"netw', False),
    ],
)
def test_which_results_of_network_plugins_are_ours(case: str, text: str, ours: bool) -> None:
    assert teardown.is_result_of_ours(text, ROOT) is ours, case


def test_sockets_that_somebody_holds_are_told_from_leftovers() -> None:
    table = (
        "Num       RefCount Protocol Flags    Type St Inode Path\n"
        "0000: 00000002 00000000 00010000 0001 01 1111 /run/containerd/s/a\n"
        "0000: 00000003 00000000 00000000 0001 03 2222\n"
    )
    assert teardown.listening_sockets(table) == {"/run/containerd/s/a"}


def test_traces_that_were_there_before_stay_and_new_ones_go(tmp_path: Path) -> None:
    old, new = tmp_path / "a" / "old", tmp_path / "b" / "c" / "new"
    old.parent.mkdir()
    old.write_text("")
    note = tmp_path / "note.json"
    with traces.cleared_afterwards(note, (str(old), str(new))):
        new.parent.mkdir(parents=True)
        new.write_text("")
        assert note.exists()
    assert old.exists()
    assert not new.exists()
    assert not (tmp_path / "b").exists()
    assert not note.exists()


def test_traces_of_a_killed_build_are_cleared_by_the_next_one(tmp_path: Path) -> None:
    trace, note = tmp_path / "b" / "trace", tmp_path / "note.json"
    note.write_text(json.dumps({"ours": [str(trace)]}))
    trace.parent.mkdir()
    trace.write_text("")
    with traces.cleared_afterwards(note, (str(trace),)):
        pass
    assert not trace.exists()


def test_the_clusters_state_is_one_folder_of_the_cache() -> None:
    cache = Cache(Path("/cache"))
    for name in ("owner", "records", "logs", "config", "pki", "etcd", "containerd", "kubelet", "pod_logs", "cni"):
        assert getattr(cache.cluster, name).is_relative_to(cache.cluster.root)
