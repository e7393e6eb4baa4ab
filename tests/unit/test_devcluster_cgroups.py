"""The pods' cgroup on both versions of cgroups, on folders laid out like the kernel's."""

from pathlib import Path

import pytest

from devcluster import cgroups
from devcluster.errors import DevClusterError
from devcluster.settings import CGROUP


def _v1(root: Path, *controllers: str) -> Path:
    for name in controllers:
        (root / name).mkdir(parents=True)
        (root / name / "cgroup.procs").write_text("")
    return root


def _v2(root: Path, controllers: str, enabled: str) -> Path:
    for folder in (root, root / CGROUP):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.procs").write_text("")
        (folder / "cgroup.controllers").write_text(controllers)
        (folder / "cgroup.subtree_control").write_text(enabled)
    return root


def test_version_1_has_a_hierarchy_per_controller_and_symbolic_links_count_once(tmp_path: Path) -> None:
    root = _v1(tmp_path, "cpu,cpuacct", "cpuset", "memory", "pids", "systemd")
    (root / "cpu").symlink_to("cpu,cpuacct")
    (root / "no-cgroup").mkdir()
    assert not cgroups.is_v2(root)
    assert [path.name for path in cgroups.hierarchies(root)] == ["cpu,cpuacct", "cpuset", "memory", "pids", "systemd"]
    assert cgroups.missing_controllers(root) == []


def test_version_2_is_one_hierarchy(tmp_path: Path) -> None:
    root = _v2(tmp_path, "cpuset cpu io memory pids\n", "")
    assert cgroups.is_v2(root)
    assert cgroups.hierarchies(root) == [root]
    assert cgroups.missing_controllers(root) == []


def test_missing_controllers_are_named(tmp_path: Path) -> None:
    assert cgroups.missing_controllers(_v1(tmp_path / "1", "cpu", "cpuset")) == ["memory", "pids"]
    assert cgroups.missing_controllers(_v2(tmp_path / "2", "cpu pids", "")) == ["cpuset", "memory"]
    assert cgroups.missing_controllers(tmp_path / "absent") == ["cpu", "cpuset", "memory", "pids"]


def test_on_version_1_the_cpuset_gets_the_machines_cpus_and_memory(tmp_path: Path) -> None:
    root = _v1(tmp_path, "cpuset", "memory")
    ours = root / "cpuset" / CGROUP
    ours.mkdir()
    for name, value in (("cpuset.cpus", "0-1\n"), ("cpuset.mems", "0\n")):
        (root / "cpuset" / name).write_text(value)
        (ours / name).write_text("\n")
    cgroups.prepare(root)
    assert (ours / "cpuset.cpus").read_text() == "0-1\n"
    assert (ours / "cpuset.mems").read_text() == "0\n"
    assert (root / "memory" / CGROUP).is_dir()


def test_on_version_2_what_is_available_and_not_yet_enabled_is_enabled(tmp_path: Path) -> None:
    root = _v2(tmp_path, "cpuset cpu io memory hugetlb pids misc", "memory pids")
    cgroups.prepare(root)
    for folder in (root, root / CGROUP):
        assert (folder / "cgroup.subtree_control").read_text() == "+cpu +cpuset +hugetlb +io"


def test_a_machine_whose_cgroups_are_read_only_is_refused_in_words(tmp_path: Path) -> None:
    root = _v1(tmp_path, "memory")
    (root / "memory" / CGROUP).write_text("not a folder")
    with pytest.raises(DevClusterError, match="Kubernetes must be able to write there"):
        cgroups.prepare(root)


def test_removal_takes_the_deepest_folders_first_and_reports_what_stays(tmp_path: Path) -> None:
    root = _v1(tmp_path, "memory", "pids")
    (root / "memory" / CGROUP / "kubepods" / "pod1").mkdir(parents=True)
    (root / "pids" / CGROUP / "kubepods").mkdir(parents=True)
    (root / "pids" / CGROUP / "kubepods" / "cgroup.procs").write_text("")  # a file keeps a plain folder in place
    left = cgroups.remove(root, timeout_s=0)
    assert not (root / "memory" / CGROUP).exists()
    assert {path.name for path in left} == {"kubepods", CGROUP}
