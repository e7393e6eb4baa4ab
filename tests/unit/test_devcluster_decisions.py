"""What the local cluster decides before it acts: whose cluster it is, what is built again, what is refused."""

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from devcluster import converge, gobuild, preflight, status
from devcluster.api import unready_reason
from devcluster.buildah import build_options, declared_arguments
from devcluster.components import Component
from devcluster.debian import mirror_of
from devcluster.errors import DevClusterError
from devcluster.images import full_name
from devcluster.owner import Owner, Verdict, judge, load_owner, running_elsewhere
from devcluster.paths import ClusterPaths, find_cache
from devcluster.processes import ProcessRecord, boot_id, is_alive, load_records, parse_stat, start_ticks
from devcluster.settings import BASE_IMAGE, PORTS, Port
from tests.support.operator_process import wait_for

OWNER = Owner("/home/one", "2026-11-30 11:57:03 +0000", "boot-1")
ALIVE = {"etcd": True, "kubelet": False}
DEAD = {"etcd": False, "kubelet": False}


@pytest.mark.parametrize(
    ("case", "owner", "checkout", "checkout_exists", "alive", "anything_there", "expected"),
    [
        ("no state folder is no cluster", None, "/home/one", False, {}, False, Verdict.ABSENT),
        ("one living process keeps our cluster ours", OWNER, "/home/one", True, ALIVE, True, Verdict.OURS),
        ("another checkout's living cluster is theirs", OWNER, "/home/two", True, ALIVE, True, Verdict.FOREIGN),
        ("a deleted checkout owns nothing", OWNER, "/home/two", False, ALIVE, True, Verdict.REMAINS),
        ("dead processes are remains, ours too", OWNER, "/home/one", True, DEAD, True, Verdict.REMAINS),
        ("dead processes are remains, theirs too", OWNER, "/home/two", True, DEAD, True, Verdict.REMAINS),
        ("a run killed before its first process leaves remains", OWNER, "/home/one", True, {}, True, Verdict.REMAINS),
        ("a folder without an owner is remains", None, "/home/one", False, ALIVE, True, Verdict.REMAINS),
    ],
)
def test_whose_cluster_it_is(
    case: str,
    owner: Owner | None,
    checkout: str,
    checkout_exists: bool,
    alive: dict[str, bool],
    anything_there: bool,
    expected: Verdict,
) -> None:
    decided = judge(
        owner, checkout=checkout, checkout_exists=checkout_exists, alive=alive, anything_there=anything_there
    )
    assert decided is expected, case


def test_the_refusal_of_a_second_checkout_says_since_when_and_from_where() -> None:
    message = running_elsewhere(OWNER)
    assert OWNER.since in message
    assert OWNER.checkout in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["", "{", "[]", '{"checkout": "/home/one"}', '{"unknown": 1}'])
def test_an_owner_record_that_was_cut_short_counts_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "owner.json"
    path.write_text(text)
    assert load_owner(path) is None


def test_an_owner_record_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "owner.json"
    path.write_text(OWNER.to_json())
    assert load_owner(path) == OWNER


def test_process_records_survive_their_files_and_damaged_ones_are_skipped(tmp_path: Path) -> None:
    record = ProcessRecord("etcd", 7, 11, "boot-1", "abc", ("etcd", "--name=x"))
    (tmp_path / "etcd.json").write_text(record.to_json())
    (tmp_path / "kubelet.json").write_text(record.to_json()[:40])
    assert load_records(tmp_path) == {"etcd": record}


def test_a_pid_given_to_another_program_is_not_ours() -> None:
    mine = start_ticks(1)
    assert mine is not None
    same = ProcessRecord("init", 1, mine, boot_id(), "", ())
    assert is_alive(same)
    assert not is_alive(ProcessRecord("init", 1, mine + 1, boot_id(), "", ()))
    assert not is_alive(ProcessRecord("init", 1, mine, "an earlier boot", "", ()))


def test_the_start_time_is_found_behind_a_name_with_parentheses_and_blanks() -> None:
    fields = " ".join(str(number) for number in range(4, 53))
    assert parse_stat(f"42 (a) b (c) S {fields}") == ("S", 20, 22)


def test_a_process_whose_first_thread_has_ended_lives_while_another_holds_its_port() -> None:
    # As an API server that was killed: its first thread is a zombie at once, the port stays taken for as long as the
    # last thread needs, and one that is started meanwhile ends with "address already in use".
    script = """if True:
        import ctypes, socket, sys, threading
        port = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=sys.stdin.read).start()
        print(port.getsockname()[1], flush=True)
        ctypes.CDLL(None).syscall({"x86_64": 60}.get(__import__("os").uname().machine, 93), 0)
    """
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            wait_for("its first thread has ended", lambda: parse_stat(_stat(process.pid))[0] == "Z", 10, every_s=0.01)
            socket.create_connection(("127.0.0.1", port)).close()
            assert start_ticks(process.pid) is not None
        finally:
            process.kill()
        wait_for("all of it has ended", lambda: start_ticks(process.pid) is None, 10, every_s=0.001)
        socket.create_server(("127.0.0.1", port)).close()


def test_a_component_that_ends_while_its_answer_is_waited_for_is_gone_and_not_silent(tmp_path: Path) -> None:
    # As a killed one that was still there when it was looked for: the silence of a living one is waited out.
    component = Component("kube-scheduler", ("sleep", "100"), health=str(tmp_path / "nobody-listens"))
    with subprocess.Popen(component.argv) as process:
        record = ProcessRecord(
            component.name, process.pid, start_ticks(process.pid) or -1, boot_id(), component.digest, component.argv
        )
        threading.Timer(0.5, process.kill).start()
        assert converge.why_anew(ClusterPaths(tmp_path), component, record) == "its process is gone"


def _stat(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text()


@pytest.mark.parametrize("changed", range(4))
def test_the_key_of_binaries_changes_with_everything_that_decides_them(changed: int) -> None:
    parts = [b"module a", b"sum", "go version go1.26.8 linux/amd64", "-s -w"]
    before = gobuild.module_key(*parts)
    assert gobuild.module_key(*parts) == before
    parts[changed] = parts[changed] + type(parts[changed])(b" " if changed < 2 else " ")
    assert gobuild.module_key(*parts) != before


def test_the_key_of_binaries_does_not_mistake_one_file_for_the_other() -> None:
    assert gobuild.module_key(b"ab", b"c", "", "") != gobuild.module_key(b"a", b"bc", "", "")


def test_every_program_that_is_built_is_a_tool_of_its_go_module() -> None:
    for module in gobuild.MODULES:
        block = (module.folder / "go.mod").read_text().split("tool (")[1].split(")")[0]
        assert set(block.split()) == {program.package for program in module.programs}


@pytest.mark.parametrize(
    ("have", "accepted"),
    [
        ("go version go1.26.0 linux/amd64", True),
        ("go version go1.26.8 linux/amd64", True),
        ("go version go1.27rc1 linux/amd64", True),
        ("go version go2.0 linux/amd64", True),
        ("go version go1.25.9 linux/amd64", False),
        ("go version devel", False),
    ],
)
def test_a_go_older_than_the_module_asks_for_is_refused_with_both_versions(have: str, accepted: bool) -> None:
    if accepted:
        gobuild.check_go(have, gobuild.KUBERNETES)
        return
    with pytest.raises(DevClusterError, match=gobuild.KUBERNETES.requirement) as refusal:
        gobuild.check_go(have, gobuild.KUBERNETES)
    assert have in str(refusal.value)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"DCP_DISAGG_CACHE": "/srv/cache"}, Path("/srv/cache")),
        ({"DCP_DISAGG_CACHE": "  "}, Path.home().resolve() / ".cache/dcp-disagg"),
        ({}, Path.home().resolve() / ".cache/dcp-disagg"),
    ],
)
def test_the_cache_is_where_the_variable_says(environment: dict[str, str], expected: Path) -> None:
    assert find_cache(environment).root == expected


def test_a_full_disk_is_refused_with_both_figures() -> None:
    assert preflight.disk_message(3 * 10**9, 3 * 10**9, Path("/c")) == ""
    message = preflight.disk_message(11 * 10**9, 2_340_000_000, Path("/c"))
    assert "11.0 GB are needed and 2.3 GB are free" in message
    assert "DCP_DISAGG_CACHE" in message


_TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:5CEE 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 111 1
   1: 00000000:4F1A 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 222 1
   2: 0100007F:4F18 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 333 1
   3: 0200007F:4F18 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 444 1
"""
_TCP6 = """  sl  local_address                         remote_address                        st tx_queue rx_queue
   0: 00000000000000000000000000000000:4F18 00000000000000000000000000000000:0000 0A 0:0 00:0 0 0 0 555 1
   1: 00000000000000000000000001000000:4F19 00000000000000000000000000000000:0000 0A 0:0 00:0 0 0 0 666 1
"""


def test_a_port_is_taken_by_a_listener_on_its_address_or_on_all() -> None:
    listeners = preflight.parse_listeners(_TCP, ipv6=False) + preflight.parse_listeners(_TCP6, ipv6=True)
    ports = [
        Port("same address", "127.0.0.1", 0x5CEE),
        Port("another address", "10.244.0.1", 0x5CEE),
        Port("all addresses", "10.244.0.1", 0x4F1A),
        Port("all addresses of IPv6", "127.0.0.1", 0x4F18),
        Port("loopback of IPv6 only", "127.0.0.1", 0x4F19),
        Port("free", "127.0.0.1", 0x1234),
    ]
    taken = {port.component: listener.inode for port, listener in preflight.taken_ports(ports, listeners)}
    assert taken == {"same address": 111, "all addresses": 222, "all addresses of IPv6": 555}


def test_no_two_components_share_a_port() -> None:
    assert len({port.number for port in PORTS}) == len(PORTS)
    # Below the range from which the kernel takes ports for outgoing connections.
    assert max(port.number for port in PORTS) < 32768


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("busybox", "docker.io/library/busybox:latest"),
        ("dcp-disagg/operator:0.1.0", "docker.io/dcp-disagg/operator:0.1.0"),
        ("local.dev/pause:1", "local.dev/pause:1"),
        ("localhost/a", "localhost/a:latest"),
        ("host:5000/a/b", "host:5000/a/b:latest"),
        ("local.dev/a@sha256:00", "local.dev/a@sha256:00"),
    ],
)
def test_an_image_is_stored_under_the_name_that_a_kubelet_looks_up(name: str, expected: str) -> None:
    assert full_name(name) == expected


_DOCKERFILE = "# ARG NOT_THIS\nARG BASE_IMAGE=debian\nFROM ${BASE_IMAGE}\nARG  PIP_INDEX_URL A B=1\n"


def test_the_arguments_that_a_dockerfile_declares_are_found() -> None:
    assert declared_arguments(_DOCKERFILE) == {"BASE_IMAGE", "PIP_INDEX_URL", "A", "B"}


@pytest.mark.parametrize(
    ("case", "dockerfile", "given", "environ", "bundle", "expected"),
    [
        ("a declared base image is ours", _DOCKERFILE, [], {}, None, ["--build-arg", f"BASE_IMAGE={BASE_IMAGE}"]),
        ("a given one wins", _DOCKERFILE, ["BASE_IMAGE=x"], {}, None, ["--build-arg", "BASE_IMAGE=x"]),
        ("nothing is added unasked", "FROM scratch", [], {"PIP_INDEX_URL": "u"}, None, []),
        (
            "the machine's package index and authorities are passed on",
            "ARG PIP_INDEX_URL",
            [],
            {"PIP_INDEX_URL": "u"},
            Path("/ca"),
            ["--build-arg", "PIP_INDEX_URL=u", "--secret", "id=ca-certificates,src=/ca"],
        ),
        ("a value may hold an equals sign", "", ["A=b=c"], {}, None, ["--build-arg", "A=b=c"]),
    ],
)
def test_build_options(
    case: str,
    dockerfile: str,
    given: list[str],
    environ: dict[str, str],
    bundle: Path | None,
    expected: list[str],
) -> None:
    assert build_options(dockerfile, given, environ, bundle) == expected, case


@pytest.mark.parametrize("argument", ["WORD", "=x", ""])
def test_a_build_argument_without_a_name_or_value_is_refused(argument: str) -> None:
    with pytest.raises(DevClusterError, match="NAME=VALUE"):
        build_options("", [argument], {}, None)


def test_the_mirror_is_the_one_that_serves_the_base_images_suite() -> None:
    targets = "http://other/x trixie\nhttp://mirror/security bookworm-security\nhttp://mirror/debian bookworm\n"
    assert mirror_of(targets) == "http://mirror/debian"
    assert mirror_of("cdrom:[disc] bookworm\n") is None


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}, ""),
        ({"status": {"conditions": [{"type": "Ready", "status": "False", "message": "no network"}]}}, "no network"),
        ({}, "the node has no Ready condition"),
        (
            {
                "status": {"conditions": [{"type": "Ready", "status": "True"}]},
                "spec": {"taints": [{"key": "node.kubernetes.io/not-ready"}]},
            },
            "the node is tainted with node.kubernetes.io/not-ready",
        ),
    ],
)
def test_a_node_is_ready_when_pods_may_run_on_it(node: dict, expected: str) -> None:
    assert unready_reason(node) == expected


def test_the_status_names_what_does_not_run() -> None:
    paths = ClusterPaths(Path("/cache/cluster"))
    states = [status.ComponentState("etcd", 5, True), status.ComponentState("kubelet", 6, False)]
    text = status.describe(paths, Verdict.OURS, OWNER, states, "the kubelet has not registered the node")
    assert OWNER.since in text
    assert OWNER.checkout in text
    lines = text.splitlines()
    assert lines[1].split() == ["etcd", "running", "pid", "5"]
    assert lines[2].split() == ["kubelet", "NOT", "RUNNING"]
    assert "node: the kubelet has not registered the node" in lines


@pytest.mark.parametrize("decided", [Verdict.ABSENT, Verdict.REMAINS])
def test_the_status_of_no_cluster_says_how_to_get_one(decided: Verdict) -> None:
    text = status.describe(ClusterPaths(Path("/cache/cluster")), decided, None, [], "")
    assert "`" in text
    assert "up" in text
    assert len(text.splitlines()) == 1
