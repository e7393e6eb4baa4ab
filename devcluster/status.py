"""``status``: what runs, since when, and what is wrong."""

from dataclasses import dataclass

from devcluster import api, processes
from devcluster.components import NAMES
from devcluster.owner import Owner, Verdict
from devcluster.paths import ClusterPaths


@dataclass(frozen=True, slots=True)
class ComponentState:
    """One line of the status: a component and how it is."""

    name: str
    pid: int | None
    alive: bool


def component_states(paths: ClusterPaths) -> list[ComponentState]:
    """The state of every component, in the order in which they start."""
    records = processes.load_records(paths.records)
    return [
        ComponentState(
            name,
            records[name].pid if name in records else None,
            name in records and processes.is_alive(records[name]),
        )
        for name in NAMES
    ]


def describe(
    paths: ClusterPaths, decided: Verdict, owner: Owner | None, states: list[ComponentState], node: str
) -> str:
    """The status as text.

    Args:
        paths: the cluster's folders.
        decided: whose cluster it is.
        owner: who started it.
        states: the components.
        node: why the node can't run pods; "" when it is Ready.
    """
    if decided is Verdict.ABSENT:
        return "no local cluster runs on this machine; `python -m devcluster up` starts one\n"
    if decided is Verdict.REMAINS or owner is None:
        return (
            f"a dead cluster's remains are in {paths.root}; `up` clears them and starts anew, `down` only clears them\n"
        )
    lines = [f"running since {owner.since} from {owner.checkout}"]
    lines += [f"  {state.name:<24} {'running' if state.alive else 'NOT RUNNING':<12} {_pid(state)}" for state in states]
    lines += [f"node: {node or 'Ready'}", f"kubeconfig: {paths.kubeconfig}", f"logs: {paths.logs}"]
    return "".join(f"{line}\n" for line in lines)


def _pid(state: ComponentState) -> str:
    return f"pid {state.pid}" if state.alive else ""


def node_state(paths: ClusterPaths) -> str:
    """Why the node can't run pods; "" when it is Ready."""
    if not api.answers(paths, f"https://{api.APISERVER.address}:{api.APISERVER.number}/readyz"):
        return "unknown, the API server does not answer"
    return api.node_problem(paths)
