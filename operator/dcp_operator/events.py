"""Events about an object: one for each change, and one that is said again is counted, not repeated."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from dcp_operator import names
from dcp_operator.build.objects import owner_reference
from dcp_operator.client import ApiError
from dcp_operator.observed import Body, Observed

log = logging.getLogger(__name__)

_MAX_MESSAGE: Final = 1024
#: Events that are remembered, so that their repetition can be counted: the oldest are forgotten.
_REMEMBERED: Final = 2000


class EventWrites(Protocol):
    """What of the API server's calls events need; `dcp_operator.client.Api` has them."""

    def create_event(self, namespace: str, event: Body) -> Body:
        """Record an event; return it as it is stored."""
        ...

    def repeat_event(self, namespace: str, name: str, count: int, now: str) -> None:
        """Say that a stored event happened again."""
        ...


@dataclass(frozen=True, slots=True)
class _Stored:
    name: str
    count: int


class Recorder:
    """Records events. They are help, not state: a failure is logged and forgotten."""

    def __init__(self, api: EventWrites, run: Callable[..., Awaitable[Any]]) -> None:
        self._api = api
        self._run = run
        #: By the object's uid, type, reason and message; the oldest first.
        self._stored: dict[tuple[str, ...], _Stored] = {}

    async def record(self, observed: Observed, reason: str, message: str, *, is_warning: bool, now: str) -> None:
        """Record an event about the object."""
        kind, message = "Warning" if is_warning else "Normal", message[:_MAX_MESSAGE]
        identity = (observed.uid, kind, reason, message)
        try:
            before = self._stored.pop(identity, None)
            if before is None or not await self._repeated(observed.key.namespace, before, now):
                event = _event(observed, kind, reason, message, now)
                body = await self._run(self._api.create_event, observed.key.namespace, event)
                before = _Stored(body["metadata"]["name"], 0)
            self._stored[identity] = replace(before, count=before.count + 1)
        except ApiError as error:
            log.info("event not recorded object=%s reason=%s error=%s", observed.key, reason, error)
        while len(self._stored) > _REMEMBERED:
            del self._stored[next(iter(self._stored))]

    async def _repeated(self, namespace: str, before: _Stored, now: str) -> bool:
        """Count an event once more; return whether it still exists, which is for an hour."""
        try:
            await self._run(self._api.repeat_event, namespace, before.name, before.count + 1, now)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True


def _event(observed: Observed, kind: str, reason: str, message: str, now: str) -> Body:
    owner = owner_reference(observed.key.name, observed.uid)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{observed.key.name}.", "namespace": observed.key.namespace},
        "involvedObject": {
            **{key: owner[key] for key in ("apiVersion", "kind", "name", "uid")},
            "namespace": observed.key.namespace,
        },
        "type": kind,
        "reason": reason,
        "message": message,
        "source": {"component": names.OPERATOR},
        "reportingComponent": names.OPERATOR,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
