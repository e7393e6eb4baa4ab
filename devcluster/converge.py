"""Makes the running processes agree with the plan: what is missing, different or silent is started anew."""

import time
from collections.abc import Sequence

from devcluster import api, preflight, processes
from devcluster.components import (
    APISERVER,
    CONTAINERD,
    CONTROLLER_MANAGER,
    ETCD,
    KUBELET,
    PROXY,
    SCHEDULER,
    Component,
)
from devcluster.errors import DevClusterError
from devcluster.files import write_text
from devcluster.paths import ClusterPaths
from devcluster.progress import Log
from devcluster.shell import last_words

# A component that says nothing for this long while its process lives is restarted. Generous: beside several engines two
# cores answer late, and to restart an API server that is only slow would make things worse.
_SILENCE_S = 20.0
_FIRST_ANSWER_S = 90.0
_GONE = "its process is gone"
# One wave at a time: what comes later exits, or falls silent, while what it depends on is away.
_WAVES = ((ETCD, CONTAINERD), (APISERVER,), (CONTROLLER_MANAGER, SCHEDULER, KUBELET, PROXY))


def converge(paths: ClusterPaths, plan: Sequence[Component], log: Log) -> list[str]:
    """Start what needs it and wait until everything answers. Returns the names of what was started."""
    records = processes.load_records(paths.records)
    # All ports at first, so that a taken one is told before anything has started.
    preflight.check_ports(
        component.name
        for component in plan
        if component.name not in records or not processes.is_alive(records[component.name])
    )
    started: list[str] = []
    for names in _WAVES:
        due = [
            component
            for component in plan
            if component.name in names and _is_due(paths, component, records.get(component.name), log)
        ]
        processes.stop([records[component.name] for component in reversed(due) if component.name in records], grace_s=5)
        preflight.check_ports(component.name for component in due)
        for component in due:
            _start(paths, component)
        for component in due:
            _wait_for_answer(paths, component)
        started += [component.name for component in due]
        if due:
            log(f"{', '.join(component.name for component in due)}: running")
    return started


def _is_due(paths: ClusterPaths, component: Component, record: processes.ProcessRecord | None, log: Log) -> bool:
    """Whether the component has to be started; says why when it ran before."""
    if record is None:
        return True
    reason = why_anew(paths, component, record)
    if reason:
        log(f"restarting {component.name}: {reason}")
    return bool(reason)


def why_anew(paths: ClusterPaths, component: Component, record: processes.ProcessRecord) -> str:
    """Why a component that ran before has to be started anew; "" when it works as planned."""
    if not processes.is_alive(record):
        return _GONE
    if record.digest != component.digest:
        return "its configuration has changed"
    return _silence(paths, component, record)


def _silence(paths: ClusterPaths, component: Component, record: processes.ProcessRecord) -> str:
    """Why no answer is to be expected of a component that ran a moment ago; "" when it answers."""
    deadline = time.monotonic() + _SILENCE_S
    while not api.answers(paths, component.health):
        if not processes.is_alive(record):  # a killed one needs a moment to end
            return _GONE
        if time.monotonic() > deadline:
            return f"it has not answered for {_SILENCE_S:.0f} s"
        time.sleep(0.2)
    return ""


def _start(paths: ClusterPaths, component: Component) -> None:
    for path, text in component.files.items():
        write_text(path, text)
    log_file = paths.logs / f"{component.name}.log"
    processes.start(component.name, component.argv, component.digest, log_file, paths.records, {})


def _wait_for_answer(paths: ClusterPaths, component: Component) -> None:
    deadline = time.monotonic() + _FIRST_ANSWER_S
    while not api.answers(paths, component.health):
        check_alive(paths, [component])
        if time.monotonic() > deadline:
            raise DevClusterError(
                f"{component.name} has not answered at {component.health} within {_FIRST_ANSWER_S:.0f} s; "
                f"see {paths.logs / f'{component.name}.log'}"
            )
        time.sleep(0.05)


def check_alive(paths: ClusterPaths, plan: Sequence[Component]) -> None:
    """Refuse to wait longer when a component has ended; the message holds its last words."""
    records = processes.load_records(paths.records)
    for component in plan:
        record = records.get(component.name)
        if record is None or not processes.is_alive(record):
            log_file = paths.logs / f"{component.name}.log"
            text = log_file.read_text(errors="replace") if log_file.exists() else ""
            raise DevClusterError(f"{component.name} ended right after its start: {last_words(text)} (log: {log_file})")
