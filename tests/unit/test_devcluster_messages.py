"""How the local cluster's command ends when it can't go on: exit code 2, one sentence, no traceback."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from devcluster import cli
from devcluster.errors import DevClusterError
from devcluster.files import locked, read_json, write_text
from devcluster.paths import CHECKOUT
from devcluster.shell import child_environment, last_words, run, search_path


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # Not tmp_path: a test's name in it makes it too long for sockets.
    with tempfile.TemporaryDirectory(prefix="dc") as folder:
        monkeypatch.setenv("DCP_DISAGG_CACHE", f"{folder}/cache")
        yield Path(folder, "cache")


@pytest.mark.parametrize("command", ["up", "down", "status", "env"])
def test_without_root_nothing_is_touched(
    command: str, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main([command]) == 2
    said = capsys.readouterr().err
    assert (
        said
        == f"devcluster {command}: the local cluster needs root for mounts, cgroups and network devices: use sudo\n"
    )
    assert not cache.exists()


def test_another_system_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cli.main(["up"]) == 2
    assert "the local cluster needs Linux" in capsys.readouterr().err


def test_a_cache_too_deep_for_sockets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DCP_DISAGG_CACHE", str(tmp_path / ("x" * 90)))
    assert cli.main(["up"]) == 2
    assert "too long by" in capsys.readouterr().err


def test_without_a_cluster_commands_say_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["logs", "etcd"]) == 2
    assert "etcd has no log" in capsys.readouterr().err
    assert cli.main(["status"]) == 1
    assert "`python -m devcluster up` starts one" in capsys.readouterr().out


def test_an_unexpected_error_is_one_sentence_and_its_traceback_a_file(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setitem(cli._COMMANDS, "status", broken)
    assert cli.main(["status"]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "unexpected error: RuntimeError: a bug; the details are in " in said
    crash = next((cache / "crashes").iterdir())
    assert str(crash) in said
    assert "Traceback" in crash.read_text()


def test_a_failing_program_is_reported_with_its_name_code_and_last_words() -> None:
    with pytest.raises(DevClusterError) as error:
        run(["sh", "-c", "echo one; echo two >&2; echo three >&2; exit 5"], what="trying")
    assert str(error.value) == "trying failed: sh ended with 5: two / three"


def test_a_missing_program_is_reported_by_name() -> None:
    with pytest.raises(DevClusterError, match="trying needs the program no-such-program"):
        run(["no-such-program"], what="trying")


def test_a_program_that_hangs_is_ended_and_reported() -> None:
    with pytest.raises(DevClusterError, match="trying did not end within 1 s"):
        run(["sleep", "30"], what="trying", timeout_s=1)


def test_last_words_are_few_and_without_blank_lines() -> None:
    assert last_words("a\n\nb\n c \n\nd\n") == "b / c / d"
    assert last_words("") == ""


def test_the_system_folders_are_searched_after_the_callers_path() -> None:
    assert search_path({"PATH": "/mine:/usr/bin"}).startswith("/mine:/usr/bin:/usr/local/sbin")
    assert "/usr/sbin" in search_path({})


def test_components_do_not_inherit_http_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    assert "HTTPS_PROXY" in child_environment()
    assert "HTTPS_PROXY" not in child_environment(proxies=False)


def test_a_file_is_written_whole_and_only_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    assert write_text(path, '{"x": 1}', mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600
    assert not write_text(path, '{"x": 1}')
    assert read_json(path) == {"x": 1}
    assert [entry.name for entry in path.parent.iterdir()] == ["b.json"]


def test_a_lock_makes_the_second_wait_and_says_for_whom(tmp_path: Path) -> None:
    # Holds the lock until it is told to go on.
    script = f"""if True:
        import sys, pathlib
        from devcluster.files import locked
        with locked(pathlib.Path({str(tmp_path / "lock")!r}), print, "x"):
            print("held", flush=True)
            sys.stdin.read()
    """
    said: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == b"held\n"

        def let_go(text: str) -> None:
            said.append(text)
            holder.stdin.close()  # type: ignore[union-attr] - asserted above

        with locked(tmp_path / "lock", let_go, "the build"):
            assert [text.split(" in ")[0] for text in said] == [f"waiting for the build: process {holder.pid}"]
