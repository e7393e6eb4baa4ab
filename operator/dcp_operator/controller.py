"""The controller process: its environment, and its run."""

import base64
import gc
import logging
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import kopf

from dcp_operator import catalogue_file, metrics
from dcp_operator.client import Api, ApiError
from dcp_operator.environment import SettingError, configure_logging, read_metrics_port, read_port
from dcp_operator.gather import slim
from dcp_operator.handlers import build_registry
from dcp_operator.health import Health
from dcp_operator.process import wait_for_api
from dcp_operator.reconciler import Reconciler, num_connections
from dcp_operator.side_server import Answer, SideServer, words
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
    #: None: metrics are not shown.
    metrics_port: int | None


def read_environment(environment: Mapping[str, str]) -> Environment:
    """Return the controller's settings. Raises SettingError."""
    image = environment.get("DCP_OPERATOR_IMAGE", "").strip()
    if not image:
        raise SettingError(
            "DCP_OPERATOR_IMAGE: is not set, must be the operator's own image; routers and connectors are taken from it"
        )
    policy = environment.get("DCP_OPERATOR_IMAGE_PULL_POLICY", "").strip() or "IfNotPresent"
    if policy not in ("Always", "IfNotPresent", "Never"):
        raise SettingError(f"DCP_OPERATOR_IMAGE_PULL_POLICY: found {policy!r}, must be Always, IfNotPresent or Never")
    listed = environment.get("DCP_WATCH_NAMESPACES", "").split(",")
    namespaces = tuple(sorted({name.strip() for name in listed if name.strip()}))
    # NetworkPolicies let the operator's pods in; a controller that runs outside of the cluster has none.
    own = environment.get("POD_NAMESPACE", "").strip() or None
    return Environment(
        Operator(image, policy, own),
        namespaces,
        read_port(environment, "DCP_HEALTH_PORT", _DEFAULT_HEALTH_PORT),
        read_metrics_port(environment),
    )


def fresh_key() -> str:
    """Return a new key for the control channel: 32 random bytes as hex digits, base64 as a Secret holds it."""
    return base64.b64encode(secrets.token_hex(_KEY_BYTES).encode()).decode()


def open_ports(environment: Environment, reconciler: Reconciler, health: Health) -> None:
    """Answer probes and scrapes from now on, in threads of their own. Raises SettingError where a port is taken."""

    def ready() -> Answer:
        return words(health.problems() if reconciler.lists.is_started else ["not everything has been listed yet"])

    SideServer(environment.health_port, {"/healthz": lambda: words(health.problems()), "/readyz": ready})
    if environment.metrics_port is not None:
        metrics.LOOP_LAG_SECONDS.set_function(health.lag_s)
        page = Answer(200, b"", metrics.CONTENT_TYPE)
        SideServer(
            environment.metrics_port, {"/metrics": lambda: page._replace(content=metrics.page(metrics.CONTROLLER))}
        )


def main() -> int:
    """Run the controller until it is told to stop; return the exit status."""
    try:
        configure_logging(os.environ)
        environment = read_environment(os.environ)
        models = catalogue_file.from_environment(os.environ.get(catalogue_file.VARIABLE, ""))
        api = Api(num_connections(environment.namespaces), keep=slim)
        reconciler = Reconciler(
            api,
            replace(environment.operator, catalogue=models.catalogue),
            namespaces=environment.namespaces,
            now=api.clock.now,
            fresh_key=fresh_key,
            models=models,
        )
        health = Health(reconciler.problems)
        open_ports(environment, reconciler, health)
        wait_for_api(api)
        # What was imported stays for good. Python's search for cycles need not go through it while others wait.
        gc.freeze()
        kopf.run(
            registry=build_registry(reconciler, health),
            standalone=True,
            clusterwide=not environment.namespaces,
            namespaces=environment.namespaces,
        )
    except (SettingError, ApiError) as error:
        sys.stderr.write(f"dcp-operator controller: {error}\n")
        return 1
    except Exception:
        log.exception("stopped by an error")
        return 1
    return 0
