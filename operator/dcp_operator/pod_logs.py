"""The logs of containers that failed, read where Kubernetes' excerpt of them does not name the cause.

Kubernetes keeps the last 2 KiB of a failed container's log. vLLM's last 2 KiB are a traceback that only points to a
cause further above, so the operator looks there: once for each end of a container, and never for one that runs.
"""

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, Final, Protocol

from dcp_operator.client import ApiError
from dcp_operator.last_words import gist, is_vague
from dcp_operator.observed import Body, Observed, entries, section
from dcp_operator.problems import failed_end

log = logging.getLogger(__name__)

#: An engine's start and its tracebacks are some two hundred lines.
_NUM_LINES: Final = 400
#: Logs read in one pass over an object: of several engines that fail, one is reported.
_AT_ONCE: Final = 2
#: Ends of containers that are remembered; the oldest are forgotten.
_REMEMBERED: Final = 256

#: A container's end: the pod's uid, the container, and which of its ends.
_End = tuple[str, str, str]


class LogReads(Protocol):
    """What of the API server's calls this needs; `dcp_operator.client.Api` has it."""

    def read_log(self, namespace: str, pod: str, container: str, *, previous: bool, num_lines: int) -> str:
        """Return the last lines that a container wrote."""
        ...


class PodLogs:
    """Looks causes up. Blocking calls go through `run`; used from one event loop."""

    def __init__(self, api: LogReads, run: Callable[..., Awaitable[Any]]) -> None:
        self._api = api
        self._run = run
        self._found: OrderedDict[_End, str] = OrderedDict()
        self._is_refused = False

    async def complete(self, observed: Observed) -> Observed:
        """Return what is observed, with what failed containers said last put in where Kubernetes' excerpt is vague."""
        pods: list[Body] = []
        left = _AT_ONCE
        for pod in observed.pods:
            found: dict[str, str] = {}
            for name, end, previous in _vague_ends(pod):
                if end not in self._found and left > 0:
                    left -= 1
                    self._keep(end, await self._read(observed.key.namespace, pod, name, previous=previous))
                if self._found.get(end):
                    found[name] = self._found[end]
            pods.append(_with_messages(pod, found) if found else pod)
        return replace(observed, pods=tuple(pods))

    async def _read(self, namespace: str, pod: Body, container: str, *, previous: bool) -> str:
        """Return a container's last lines; the empty text where they can't be had, which is not tried again."""
        name = pod["metadata"]["name"]
        try:
            # The client's keyword arguments: `run` passes positional ones.
            return await self._run(
                lambda: self._api.read_log(namespace, name, container, previous=previous, num_lines=_NUM_LINES)
            )
        except ApiError as error:
            level = logging.INFO if self._is_refused or error.status != 403 else logging.WARNING
            self._is_refused = self._is_refused or error.status == 403
            log.log(level, "log not read pod=%s container=%s error=%s", name, container, error)
            return ""

    def _keep(self, end: _End, text: str) -> None:
        self._found[end] = "" if is_vague(text) else gist(text)
        while len(self._found) > _REMEMBERED:
            self._found.popitem(last=False)


def _vague_ends(pod: Body) -> Iterator[tuple[str, _End, bool]]:
    """Yield (container, its end, whether another run of it has begun) for each failure whose excerpt has no cause."""
    for entry in entries(pod, "status", "containerStatuses"):
        ended = failed_end(entry)
        if ended is None or not is_vague(ended.get("message") or ""):
            continue
        previous = ended is not section(entry, "state").get("terminated")
        run = ended.get("containerID") or f"{entry.get('restartCount', 0)}/{ended.get('finishedAt', '')}"
        yield entry["name"], (pod["metadata"]["uid"], entry["name"], run), previous


def _with_messages(pod: Body, found: dict[str, str]) -> Body:
    """Return a pod whose failed containers have these texts as the last that they said."""

    def completed(entry: Body) -> Body:
        text = found.get(entry["name"])
        if text is None:
            return entry
        ended = failed_end(entry)
        where = "state" if ended is section(entry, "state").get("terminated") else "lastState"
        return {**entry, where: {**section(entry, where), "terminated": {**(ended or {}), "message": text}}}

    containers = [completed(entry) for entry in entries(pod, "status", "containerStatuses")]
    return {**pod, "status": {**section(pod, "status"), "containerStatuses": containers}}
