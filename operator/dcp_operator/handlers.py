"""The controller process: kopf watches, and every event goes to `dcp_operator.controller`.

Only `kopf.on.event` is used. Other handlers make kopf keep state in the object and put a finalizer on it, and then an
object could not be deleted without the operator (docs/adr/0002-no-finalizer.md).
"""

import base64
import datetime
import logging
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import kopf

from dcp_operator.client import Api, ApiError
from dcp_operator.controller import Controller
from dcp_operator.gather import WATCHED_KINDS
from dcp_operator.kinds import DEPLOYMENT_OF_ENGINES, Kind
from dcp_operator.names import LABEL_NAME
from dcp_operator.process import EnvironmentFault, configure_logging, quiet_kopf, read_port, wait_for_api
from dcp_operator.target import Operator

log = logging.getLogger(__name__)

_KEY_BYTES: Final = 32
_DEFAULT_HEALTH_PORT: Final = 8080


@dataclass(frozen=True, slots=True)
class Environment:
    """What the controller reads from its environment."""

    operator: Operator
    namespaces: tuple[str, ...]
    health_port: int


def read_environment(environment: Mapping[str, str]) -> Environment:
    """Return the controller's settings. Raises EnvironmentFault."""
    image = environment.get("DCP_OPERATOR_IMAGE", "").strip()
    if not image:
        raise EnvironmentFault(
            "DCP_OPERATOR_IMAGE: is not set, must be the operator's own image; routers and connectors are taken from it"
        )
    policy = environment.get("DCP_OPERATOR_IMAGE_PULL_POLICY", "").strip() or "IfNotPresent"
    if policy not in ("Always", "IfNotPresent", "Never"):
        raise EnvironmentFault(
            f"DCP_OPERATOR_IMAGE_PULL_POLICY: found {policy!r}, must be Always, IfNotPresent or Never"
        )
    listed = environment.get("DCP_WATCH_NAMESPACES", "").split(",")
    namespaces = tuple(sorted({name.strip() for name in listed if name.strip()}))
    return Environment(
        Operator(image, policy), namespaces, read_port(environment, "DCP_HEALTH_PORT", _DEFAULT_HEALTH_PORT)
    )


def build_registry(controller: Controller) -> kopf.OperatorRegistry:
    """Return kopf's registry with the controller's handlers."""
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry)
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:  # pyright: ignore[reportUnusedFunction] - registered
        quiet_kopf(settings)
        for kind in WATCHED_KINDS:
            if kind is not DEPLOYMENT_OF_ENGINES:
                settings.watching.label_selectors[kind.group, kind.version, kind.plural] = LABEL_NAME
        await controller.start()

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:  # pyright: ignore[reportUnusedFunction] - registered
        await controller.stop()

    @kopf.on.probe(registry=registry, id="stuck")
    async def probe(**_: Any) -> list[str]:  # pyright: ignore[reportUnusedFunction] - registered
        stuck = [str(key) for key in controller.stuck()]
        if stuck:
            raise kopf.PermanentError(f"reconciling does not end for: {', '.join(stuck)}")
        return stuck

    for kind in WATCHED_KINDS:
        _watch(registry, kind, controller)
    return registry


def now() -> str:
    """Return the time as RFC 3339, in seconds."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def fresh_key() -> str:
    """Return a new key for the control channel: 32 random bytes as hex digits, base64 as a Secret holds it."""
    return base64.b64encode(secrets.token_hex(_KEY_BYTES).encode()).decode()


def main() -> int:
    """Run the controller until it is told to stop; return the exit status."""
    configure_logging()
    try:
        environment = read_environment(os.environ)
        api = Api()
        wait_for_api(api)
        controller = Controller(
            api, environment.operator, namespaces=environment.namespaces, now=now, fresh_key=fresh_key
        )
        kopf.run(
            registry=build_registry(controller),
            standalone=True,
            clusterwide=not environment.namespaces,
            namespaces=environment.namespaces,
            liveness_endpoint=f"http://0.0.0.0:{environment.health_port}/healthz",
        )
    except (EnvironmentFault, ApiError, kopf.ActivityError) as error:
        sys.stderr.write(f"dcp-operator controller: {error.__cause__ or error}\n")
        return 1
    return 0


def _watch(registry: kopf.OperatorRegistry, kind: Kind, controller: Controller) -> None:
    @kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=kind.plural)
    async def changed(event: kopf.RawEvent, **_: Any) -> None:  # pyright: ignore[reportUnusedFunction] - registered
        controller.on_event(kind, event["type"], dict(event["object"]))
