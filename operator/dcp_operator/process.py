"""What the controller sets up before its work: kopf's settings, and waiting for the CRD."""

import itertools
import logging
import time
from collections.abc import Iterator
from typing import Any, Final, cast

import kopf

from dcp_operator.client import Api, ApiError
from dcp_operator.kinds import DEPLOYMENT_OF_ENGINES, SCALER

log = logging.getLogger(__name__)

_POLL_S: Final = 5.0


def quiet_kopf(settings: kopf.OperatorSettings) -> None:
    """Have kopf do no more than it is asked: no events, no peering, no watching of namespaces and CRDs."""
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.networking.connect_timeout = 5
    settings.process.ultimate_exiting_timeout = 30
    settings.persistence.diffbase_storage = _NoDiffs()
    # A task for each object holds its last event for so long after it, and at a start there is one for each of them.
    settings.queueing.idle_timeout = 0.5


class _NoDiffs(kopf.DiffBaseStorage):
    """What objects were like before, for handlers of changes. There are none, and a copy of every object costs time."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Return what there is to compare: nothing."""
        return cast("kopf.BodyEssence", {})

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        """Return what was stored: nothing."""
        return None

    def store(self, **_: Any) -> None:
        """Store nothing."""


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
    """Return when the API server answers and knows our kinds; say what is waited for while it does not."""
    said = ""
    while True:
        try:
            missing = [kind.plural for kind in (DEPLOYMENT_OF_ENGINES, SCALER) if not api.serves(kind)]
            if not missing:
                return
            why = f"the CustomResourceDefinition of {' and '.join(missing)} is not installed"
        except ApiError as error:
            why = error.message
        if why != said:
            log.warning("waiting for the API server why=%s", why)
            said = why
        time.sleep(_POLL_S)
