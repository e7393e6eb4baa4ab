"""kopf's side of the controller: the life of the process, and the watch of the object's own kind.

Only `kopf.on.event` is used. Other handlers make kopf keep state in the object and put a finalizer on it, and then an
object could not be deleted without the operator (docs/adr/0002-no-finalizer.md). Everything else is followed by
`dcp_operator.watches` (docs/adr/0019-watches.md).
"""

import asyncio
import logging
from typing import Any, Final

import kopf

from dcp_operator.client import ApiError
from dcp_operator.health import Health
from dcp_operator.kinds import DEPLOYMENT_OF_ENGINES
from dcp_operator.process import keep_watching, new_registry, quiet_kopf
from dcp_operator.reconciler import Reconciler

log = logging.getLogger(__name__)

_RETRY_S: Final = 5.0


def build_registry(reconciler: Reconciler, health: Health) -> kopf.OperatorRegistry:
    """Return kopf's registry with the controller's handlers."""
    registry = new_registry()
    beating: set[asyncio.Task[None]] = set()
    kind = DEPLOYMENT_OF_ENGINES

    @kopf.on.startup(registry=registry)
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:  # pyright: ignore[reportUnusedFunction] - registered
        beating.add(asyncio.create_task(health.keep_beating()))
        quiet_kopf(settings)
        keep_watching(settings)
        while True:
            try:
                return await reconciler.start()
            except ApiError as error:
                # Without one of the lists nothing can be judged; which one is missing is in the message.
                log.warning("waiting until everything can be listed error=%s", error)
                await asyncio.sleep(_RETRY_S)

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:  # pyright: ignore[reportUnusedFunction] - registered
        await reconciler.stop()
        for task in beating:
            task.cancel()

    @kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=kind.plural)
    async def changed(event: kopf.RawEvent, **_: Any) -> None:  # pyright: ignore[reportUnusedFunction] - registered
        reconciler.lists.on_event(kind, event["type"], dict(event["object"]))

    return registry
