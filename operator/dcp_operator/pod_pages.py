"""Pages that pods serve, read by HTTP at the pods' own addresses: many at once, none waited for."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

import aiohttp

#: An address of the cluster's own network answers at once or not at all.
_CONNECT_S: Final = 0.25
_ANSWER_S: Final = 1.0
#: A page that could not be had is not asked for again so soon: what waits for it should not wait each time.
_SILENT_FOR_S: Final = 60.0
_MAX_BYTES: Final = 4 * 1024 * 1024


class PodPages:
    """Reads pages of pods. Used from one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._silent_until: dict[str, float] = {}

    async def read(self, urls: Sequence[str]) -> list[str]:
        """Return the pages in the order of the URLs; of one that can't be had, the empty text."""
        now = self._clock()
        self._silent_until = {url: until for url, until in self._silent_until.items() if until > now}
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S, sock_connect=_CONNECT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            return list(await asyncio.gather(*(self._page(session, url) for url in urls)))

    async def _page(self, session: aiohttp.ClientSession, url: str) -> str:
        if url in self._silent_until:
            return ""
        try:
            # No redirect is followed: a pod does not choose whom the operator asks.
            async with session.get(url, allow_redirects=False) as answer:
                if answer.status == 200:
                    return (await _body(answer)).decode("utf-8", "replace")
        except (aiohttp.ClientError, TimeoutError, OSError):
            pass
        self._silent_until[url] = self._clock() + _SILENT_FOR_S
        return ""


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    """Return the body, cut off where no honest page is as long."""
    parts = bytearray()
    async for part in answer.content.iter_chunked(1 << 16):
        parts += part
        if len(parts) > _MAX_BYTES:
            break
    return bytes(parts)
