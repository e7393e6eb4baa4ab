"""Lock files name the public package index alone: a clone anywhere can install from them."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = [ROOT / "uv.lock", ROOT / "devcluster/engine/uv.lock"]
PUBLIC = {"pypi.org", "files.pythonhosted.org"}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_lock_names_no_other_host(lock: Path) -> None:
    hosts = set(re.findall(r'"https?://([^/"]+)', lock.read_text()))
    assert hosts
    assert hosts <= PUBLIC


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_locked_package_comes_from_the_index_or_the_repository(lock: Path) -> None:
    sources = {next(iter(package["source"])) for package in tomllib.loads(lock.read_text())["package"]}
    assert sources <= {"registry", "editable", "directory", "virtual"}


def test_no_file_redirects_an_installer() -> None:
    for name in ("pyproject.toml", "devcluster/engine/pyproject.toml"):
        tables = tomllib.loads((ROOT / name).read_text()).get("tool", {}).get("uv", {})
        assert not {"index", "index-url", "extra-index-url", "find-links"} & set(tables), name
