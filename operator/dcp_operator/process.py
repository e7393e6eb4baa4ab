"""What the controller sets up before its work: kopf's settings, and waiting for the CRD."""

import itertools
import logging
import time
from collections.abc import Iterator
from typing import Final

import kopf

from dcp_operator.client import Api, ApiError
from dcp_operator.kinds import DEPLOYMENT_OF_ENGINES

log = logging.getLogger(__name__)

_POLL_S: Final = 5.0


def quiet_kopf(settings: kopf.OperatorSettings) -> None:
    """Have kopf do no more than it is asked: no events, no peering, no watching of namespaces and CRDs."""
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.networking.connect_timeout = 5
    settings.process.ultimate_exiting_timeout = 30


def keep_watching(settings: kopf.OperatorSettings) -> None:
    """Have kopf try a watch again for as long as it takes: after its own few retries it gives a watch up for good."""
    settings.networking.error_backoffs = _Pauses()


class _Pauses:
    """Seconds between retries, without an end."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1.0, 2.0, 4.0, 8.0, 16.0, 32.0), itertools.repeat(60.0))


def new_registry() -> kopf.OperatorRegistry:
    """Return a registry of handlers that logs in as `dcp_operator.client` does: kopf's own has more handlers in it."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry, id="client")(kopf.login_via_client)
    return registry


def wait_for_api(api: Api) -> None:
    """Return when the API server answers and knows our kind; say what is waited for while it does not."""
    said = ""
    while True:
        try:
            if api.serves(DEPLOYMENT_OF_ENGINES):
                return
            why = f"the CustomResourceDefinition {DEPLOYMENT_OF_ENGINES.plural} is not installed; waiting for it"
        except ApiError as error:
            why = f"waiting for the API server: {error.message}"
        if why != said:
            log.warning(why)
            said = why
        time.sleep(_POLL_S)
