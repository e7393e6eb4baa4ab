"""The pods of an engine that spans several: what their containers are started with.

A group is one engine. Its leader is the engine's first node: the scheduler, the HTTP server and the connector's
bootstrap are there. The others hold ranks and nothing else (vLLM 0.32 and 0.33, `vllm/entrypoints/cli/serve.py`:
run_headless). They meet at the leader's name, which LeaderWorkerSet puts into every container's environment, and learn
everything else from it: vLLM's own process group carries the connector's addresses of each rank to the scheduler.
"""

import copy
from typing import Final

from dcp_operator import names
from dcp_operator.api.spec import Spec
from dcp_operator.build.merge import Manifest
from dcp_operator.build.stopping import engine_pre_stop, with_pre_stop
from dcp_operator.build.wiring import side_ports
from dcp_operator.ports import EnginePorts
from dcp_operator.settings import Role, role_spec

#: How a pod without a server is started: the module of the server alone doesn't know how.
_HEADLESS_COMMAND: Final = ("python3", "-m", "vllm.entrypoints.cli.main", "serve")
_SERVER_MODULE: Final = "vllm.entrypoints.openai.api_server"
_PROBES: Final = ("startupProbe", "readinessProbe", "livenessProbe")
_LEADER_ADDRESS: Final = f"$({names.ENV_LEADER_ADDRESS})"
_WORKER_INDEX: Final = f"$({names.ENV_WORKER_INDEX})"
_RANK_FLAG: Final = "--node-rank="


def node_flags(spec: Spec, role: Role, ports: EnginePorts) -> list[tuple[str, str | int | None]]:
    """Return vLLM's flags for an engine on several nodes, of its first one; none where a pod is the whole engine."""
    stated = role_spec(spec, role).multinode
    if stated is None:
        return []
    return [
        ("--nnodes", stated.node_count),
        ("--node-rank", 0),
        ("--master-addr", _LEADER_ADDRESS),
        ("--master-port", ports.group),
    ]


def worker_template(spec: Spec, role: Role, leader: Manifest, ports: EnginePorts) -> Manifest:
    """Return the pod template of a group's other pods, from that of its leader.

    They serve nothing: no port that others ask for, no probe, and no label by which engines are selected. Whether they
    are well shows in the engine that they are part of. They go when their leader has nothing left to do. Raises
    TemplateError for a lifecycle that can't be merged.
    """
    result = copy.deepcopy(leader)
    labels: dict[str, str] = result["metadata"]["labels"]
    component = names.worker_component(role)
    labels |= {names.LABEL_ROLE: component, "app.kubernetes.io/component": component}
    labels.pop(names.LABEL_LLMD_ROLE, None)
    containers: list[Manifest] = result["spec"]["containers"]
    index = next(at for at, each in enumerate(containers) if each["name"] == names.CONTAINER_MAIN)
    main = _without_server(spec, role, containers[index], ports)
    containers[index] = _drained(spec, role, main, ports, result["spec"])
    return result


def _without_server(spec: Spec, role: Role, leader: Manifest, ports: EnginePorts) -> Manifest:
    result = {key: value for key, value in leader.items() if key not in (*_PROBES, "ports")}
    serving = {ports.api, ports.group, *(number for _, number in side_ports(spec, role, ports))}
    own = [port for port in leader.get("ports", []) if port["containerPort"] not in serving]
    if own:
        result["ports"] = own
    if _SERVER_MODULE in leader["command"]:
        result["command"] = list(_HEADLESS_COMMAND)
    result["args"] = [
        *(f"{_RANK_FLAG}{_WORKER_INDEX}" if arg.startswith(_RANK_FLAG) else arg for arg in leader["args"]),
        "--headless",
    ]
    return result


def _drained(spec: Spec, role: Role, main: Manifest, ports: EnginePorts, pod: Manifest) -> Manifest:
    """Return the container with a preStop handler that asks the leader; the template's own handler stays."""
    grace_s = pod.get("terminationGracePeriodSeconds")
    lifecycle = dict(main.get("lifecycle") or {})
    if lifecycle.get("preStop") == engine_pre_stop(spec, main["command"], ports.api, grace_s=grace_s):
        del lifecycle["preStop"]
    bare = {key: value for key, value in main.items() if key != "lifecycle"}
    handler = engine_pre_stop(spec, main["command"], ports.api, grace_s=grace_s, host_variable=names.ENV_LEADER_ADDRESS)
    return with_pre_stop({**bare, "lifecycle": lifecycle} if lifecycle else bare, handler, f"spec.{role}.template")
