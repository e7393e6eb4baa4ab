"""What pods do before they are stopped, so that nobody's request ends with them (docs/adr/0013-drain-in-the-pod.md).

The work is done in the pod: it holds for every way in which a pod goes, with or without an operator.
"""

import math
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Final

from dcp_operator.api.spec import Spec
from dcp_operator.build.merge import Manifest, part
from dcp_operator.connectors import PROFILES, lease_of

#: How long a pod that goes still takes requests, in seconds: until routers, endpoints and proxies know that it goes.
SETTLE_S: Final = 5
#: What an engine may need beyond drain and lease to end its processes, in seconds.
EXIT_MARGIN_S: Final = 30
#: Infinity is a number to YAML and to the connector, but not a grace period.
_MAX_LEASE_S: Final = 1e9
_PYTHON: Final = "python3"


def lease_s(spec: Spec) -> int:
    """Return how long prefill keeps KV that nobody fetches, in whole seconds."""
    profile = PROFILES[spec.kv_connector.type]
    stated = lease_of(profile, spec.kv_connector.extra_config)
    return math.ceil(min(profile.lease_s if stated is None else stated, _MAX_LEASE_S))


def termination_grace_s(spec: Spec) -> int:
    """Return the grace period of an engine pod, in seconds: requests end, then held KV is fetched or expires."""
    return max(SETTLE_S, spec.drain_timeout_seconds) + lease_s(spec) + EXIT_MARGIN_S


def router_grace_s(spec: Spec) -> int:
    """Return the grace period of a router pod, in seconds: as long as its engines would wait for its requests."""
    return SETTLE_S + spec.drain_timeout_seconds


def engine_pre_stop(
    spec: Spec, command: Sequence[object], port: int, *, grace_s: object = None, host_variable: str | None = None
) -> Manifest | None:
    """Return the preStop handler of an engine's container, which `command` starts and whose engine listens on `port`.

    With the bundled connector it waits for what runs and what is held. vLLM's own connectors don't say what they hold:
    the engine goes on for --shutdown-timeout after a pause within the pod's grace period. `host_variable` names the
    variable with the engine's host, for a pod that has only some of an engine's ranks.
    """
    if not PROFILES[spec.kv_connector.type].bundled:
        return pause(grace_s)
    where = [f"--host-variable={host_variable}"] if host_variable is not None else []
    times = [f"--settle={SETTLE_S}", f"--requests={spec.drain_timeout_seconds}", f"--kv={lease_s(spec)}"]
    return {"exec": {"command": [_interpreter(command), "-m", "dcp_connector.drain", f"--port={port}", *where, *times]}}


def with_pre_stop(container: Manifest, handler: Manifest | None, path: str = "template") -> Manifest:
    """Return a container with a preStop handler, unless it has one: that of a template is the user's choice.

    `path` is that of the template. Raises TemplateError where `lifecycle` is no mapping.
    """
    lifecycle = part(container, "lifecycle", f"{path}.spec.containers[{container['name']}]")
    if handler is None or lifecycle.get("preStop"):
        return container
    return {**container, "lifecycle": {**lifecycle, "preStop": handler}}


def pause(grace_s: object) -> Manifest | None:
    """Return a preStop handler that does nothing for a while, within a grace period; None where there is no time."""
    seconds = min(SETTLE_S, grace_s) if isinstance(grace_s, int) else SETTLE_S
    return {"sleep": {"seconds": seconds}} if seconds > 0 else None


def _interpreter(command: Sequence[object]) -> str:
    """Return the interpreter that runs the engine, if it is stated: only that one is sure to find the connector."""
    first = command[0] if command else None
    return first if isinstance(first, str) and PurePosixPath(first).name.startswith("python") else _PYTHON
