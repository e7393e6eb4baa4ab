"""What enforces policies on the local node, as far as it is decided without a kernel."""

from pathlib import Path

import pytest

from devcluster.network import removal_script
from devcluster.policies import account, command, is_listening, rules


@pytest.mark.parametrize(
    ("queues", "is_there"),
    [
        ("   98  28476     0 2   128     0     0       12  1\n", True),
        ("    7    120     0 2   128     0     0       98  1\n", False),
        ("  980    120     0 2   128     0     0        0  1\n", False),
        ("", False),
    ],
)
def test_the_kernel_tells_whether_somebody_takes_the_packets(queues: str, is_there: bool):
    assert is_listening(queues) is is_there


def test_packets_pass_when_nobody_takes_them_and_root_is_never_asked():
    chain = [rule for rule in rules() if rule[0] == "-A" and rule[1] != "POSTROUTING"]
    assert chain[0][-4:] == ["--uid-owner", "0", "-j", "RETURN"]
    assert [rule for rule in chain if "NFQUEUE" in rule and "--queue-bypass" not in rule] == []


def test_what_it_leaves_in_the_kernel_goes_with_the_cluster():
    saved = (
        "*mangle\n:POSTROUTING ACCEPT [0:0]\n:KUBE-DCP-POLICIES - [0:0]\n-A POSTROUTING -j KUBE-DCP-POLICIES\nCOMMIT\n"
    )
    assert {rule[1] for rule in rules()} == {"POSTROUTING", "KUBE-DCP-POLICIES"}
    assert removal_script(saved).splitlines()[1:4] == [
        "-D POSTROUTING -j KUBE-DCP-POLICIES",
        "-F KUBE-DCP-POLICIES",
        "-X KUBE-DCP-POLICIES",
    ]


def test_it_may_read_what_it_decides_from_and_nothing_else():
    (role,) = [each for each in account() if each["kind"] == "ClusterRole"]
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"list", "watch"}
    assert {resource for rule in role["rules"] for resource in rule["resources"]} <= {
        "pods",
        "namespaces",
        "nodes",
        "networkpolicies",
    }


def test_its_account_is_seen_by_it_alone():
    line = command(Path("/binaries"), Path("/token"), Path("/ca"))
    assert line[:2] == ["unshare", "--mount"]
    assert line[line.index("/binaries/kube-network-policies") - 2 :][:2] == ["/token", "/ca"]
