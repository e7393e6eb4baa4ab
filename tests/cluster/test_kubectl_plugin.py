"""`kubectl dcpd`: the plugin as a real kubectl finds and runs it."""

import os
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.helm import run_client
from tests.support.specimens import sizes, specimen


@pytest.fixture(autouse=True)
def _on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def test_kubectl_lists_the_plugin():
    assert str(Path(sys.executable).with_name("kubectl-dcpd")) in run_client("kubectl", "plugin", "list").stdout


def test_kubectl_runs_it_under_its_own_name():
    assert run_client("kubectl", "dcpd", "--version").stdout.startswith("kubectl dcpd 0.")
    assert "usage: kubectl dcpd validate" in run_client("kubectl", "dcpd", "validate", "--help").stdout


def test_exit_codes_and_input_pass_through_kubectl():
    allowed = run_client("kubectl", "dcpd", "validate", "-f", "-", stdin=yaml.safe_dump(specimen()))
    assert allowed.stdout == "-: models/chat is allowed\n"
    refused = specimen(sizes("decode", tensor=8, decodeContext=3))
    result = run_client("kubectl", "dcpd", "validate", "-f", "-", stdin=yaml.safe_dump(refused), check=False)
    assert result.returncode == 1
    assert "[dcp-divides-tp]" in result.stdout
