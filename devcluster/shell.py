"""Runs other programs, and turns their failures into one readable sentence."""

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from devcluster.errors import DevClusterError

# Debian keeps iptables, debootstrap and runc where the PATH of a plain shell may not look.
_SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


def search_path(environ: Mapping[str, str] = os.environ) -> str:
    """The PATH of the caller, with the system folders that it lacks."""
    folders = [folder for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    return os.pathsep.join(folders + [folder for folder in _SYSTEM_FOLDERS if folder not in folders])


def find_program(name: str) -> str | None:
    """The path of a program, or None."""
    return shutil.which(name, path=search_path())


def child_environment(extra: Mapping[str, str] | None = None, *, proxies: bool = True) -> dict[str, str]:
    """The environment for a program. ``proxies=False`` leaves HTTP proxies out: the cluster's traffic stays here."""
    kept = {name: value for name, value in os.environ.items() if proxies or name.lower() not in _PROXY_VARIABLES}
    return kept | {"PATH": search_path()} | dict(extra or {})


def last_words(text: str, lines: int = 3) -> str:
    """The last non-empty lines of an output, joined to one."""
    kept = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(kept[-lines:])[-900:]


def run(
    argv: Sequence[str | Path],
    *,
    what: str,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float | None = None,
    log_file: Path | None = None,
    quote: Callable[[str], str] = last_words,
) -> str:
    """Run a program to its end and return its standard output.

    Args:
        argv: program and arguments.
        what: the step in words, for the error message, as in "building kubelet".
        stdin: text for its standard input; without it the input is empty.
        env: variables on top of the caller's.
        cwd: working folder.
        timeout_s: limit in seconds.
        log_file: append all output there instead of returning it.
        quote: what of a failed program's output stands in the error message; its last lines unless said otherwise.

    Raises:
        DevClusterError: the program is missing, failed, or took too long; the message holds its last words.
    """
    program = str(argv[0])
    try:
        with Path(log_file or os.devnull).open("ab") as log:
            completed = subprocess.run(
                [str(part) for part in argv],
                input=(stdin or "").encode(),
                stdout=log if log_file else subprocess.PIPE,
                stderr=subprocess.STDOUT if log_file else subprocess.PIPE,
                env=child_environment(env),
                cwd=cwd,
                timeout=timeout_s,
                check=False,
            )
    except FileNotFoundError as error:
        raise DevClusterError(f"{what} needs the program {program}, which is not on PATH") from error
    except subprocess.TimeoutExpired as error:
        raise DevClusterError(f"{what} did not end within {timeout_s:.0f} s: {program}") from error
    if completed.returncode == 0:
        return (completed.stdout or b"").decode(errors="replace")
    if log_file:
        said = f"{last_words(log_file.read_text(errors='replace'))} (all of it: {log_file})"
    else:
        said = quote((completed.stderr or completed.stdout or b"").decode(errors="replace"))
    raise DevClusterError(f"{what} failed: {Path(program).name} ended with {completed.returncode}: {said}")


def succeeds(argv: Sequence[str | Path], timeout_s: float = 60) -> bool:
    """Whether a program runs and exits 0; its output is dropped."""
    try:
        completed = subprocess.run(
            [str(part) for part in argv],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=child_environment(proxies=False),
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return completed.returncode == 0
