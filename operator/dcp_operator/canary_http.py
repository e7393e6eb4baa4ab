"""One check of the KV transfer, made over HTTP: counters before, a prompt through the router, counters after."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import aiohttp

from dcp_operator.canary.counters import Reading, read_page
from dcp_operator.canary.judge import Answer, Evidence, Pages, Verdict, judge
from dcp_operator.canary.request import Engine, Request, completion_body
from dcp_operator.last_words import cut
from dcp_operator.settings import Role

#: Time to connect, for a page, and for the prompt's answer, in seconds.
CONNECT_S: Final = 2.0
PAGE_S: Final = 5.0
ANSWER_S: Final = 60.0
#: Engines show what they counted when they come round, a step after they counted it: how long that is waited for.
SETTLE_S: Final = 5.0
_POLL_S: Final = 0.2
#: How often a check is made whose counters others' requests moved too.
_TRIES: Final = 3
#: Pages read at the same time.
_AT_ONCE: Final = 16
_MAX_BYTES: Final = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check found, and how many prompts it sent."""

    verdict: Verdict
    num_prompts: int


class HttpProbe:
    """Makes checks. `new_nonce` gives letters and digits that were never given before."""

    def __init__(self, new_nonce: Callable[[], str], *, answer_s: float = ANSWER_S, settle_s: float = SETTLE_S) -> None:
        self._new_nonce = new_nonce
        self._answer_s = answer_s
        self._settle_s = settle_s

    async def check(self, request: Request) -> Outcome:
        """Make one check; it ends, whatever the engines do."""
        timeout = aiohttp.ClientTimeout(total=PAGE_S, sock_connect=CONNECT_S)
        connector = aiohttp.TCPConnector(limit=_AT_ONCE)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            verdict, num_prompts = judge(_nothing(request)), 0
            for _ in range(_TRIES):
                verdict, is_sent = await self._try(session, request)
                num_prompts += is_sent
                if not verdict.is_ambiguous:
                    break
            return Outcome(verdict, num_prompts)

    async def _try(self, session: aiohttp.ClientSession, request: Request) -> tuple[Verdict, bool]:
        """Return what one try found, and whether its prompt has reached the router."""
        before, unread = await _read(session, request)
        if unread:
            pages = _pages(request, before, before, unread)
            return judge(Evidence(request.num_tokens, Answer(None, "not asked"), pages)), False
        answer = await self._ask(session, request)
        deadline = time.monotonic() + self._settle_s
        while True:
            after, unread = await _read(session, request)
            evidence = Evidence(request.num_tokens, answer, _pages(request, before, after, unread))
            verdict = judge(evidence)
            if verdict.is_settled or time.monotonic() >= deadline:
                break
            await asyncio.sleep(_POLL_S)
        if verdict.said.status == "False":
            verdict = judge(replace(evidence, failures=await _failures(session, request)))
        return verdict, answer.is_reached

    async def _ask(self, session: aiohttp.ClientSession, request: Request) -> Answer:
        url, body = f"{request.router_url}/v1/completions", completion_body(request, self._new_nonce())
        timeout = aiohttp.ClientTimeout(total=self._answer_s, sock_connect=CONNECT_S)
        try:
            async with session.post(url, json=body, timeout=timeout, allow_redirects=False) as answer:
                words = _elsewhere(answer) or await _text(answer)
                return Answer(answer.status, words[:2000])
        except aiohttp.ClientConnectorError as error:
            return Answer(None, str(error), is_reached=False)
        except aiohttp.ConnectionTimeoutError:
            return Answer(None, f"{request.router_url} takes no connection", is_reached=False)
        except TimeoutError:
            return Answer(None, f"no answer within {self._answer_s:.0f} s")
        except (aiohttp.ClientError, OSError) as error:
            return Answer(None, f"the connection ended before an answer: {error or type(error).__name__}")


async def _read(session: aiohttp.ClientSession, request: Request) -> tuple[dict[str, Reading | None], dict[str, str]]:
    """Return the counters by pod, and of those whose page could not be had why."""

    async def page(engine: Engine) -> tuple[Reading | None, str]:
        text, why = await _get(session, engine.metrics_url)
        return (None, why) if text is None else (read_page(text), "")

    found = await asyncio.gather(*(page(engine) for engine in request.engines))
    named = list(zip((engine.pod for engine in request.engines), found, strict=True))
    return {pod: reading for pod, (reading, _) in named}, {pod: why for pod, (_, why) in named if why}


async def _failures(session: aiohttp.ClientSession, request: Request) -> tuple[tuple[str, str], ...]:
    """Return what decode engines say of their last failures: (reason, detail), the newest first."""
    urls = [engine.failures_url for engine in request.engines if engine.failures_url is not None]
    told: list[dict[str, Any]] = []
    for text, _ in await asyncio.gather(*(_get(session, url) for url in urls)):
        told += _entries(text)
    told.sort(key=lambda entry: -entry["at"])
    return tuple((entry["reason"], entry["detail"]) for entry in told)


def _entries(text: str | None) -> list[dict[str, Any]]:
    """Return the failures in an answer of `dcp_connector.failures`; of another program's answer nothing."""
    try:
        value = json.loads(text or "")
    except (ValueError, RecursionError):
        return []
    listed: Any = cast("dict[str, Any]", value).get("failures") if isinstance(value, dict) else None
    found = cast("list[Any]", listed if isinstance(listed, list) else [])
    return [cast("dict[str, Any]", entry) for entry in found if _is_entry(entry)]


def _is_entry(entry: Any) -> bool:
    kinds = {"reason": str, "detail": str, "at": int}
    return isinstance(entry, dict) and all(
        isinstance(cast("dict[str, Any]", entry).get(key), kind) for key, kind in kinds.items()
    )


async def _get(session: aiohttp.ClientSession, url: str) -> tuple[str | None, str]:
    """Return a page, or None and why it can't be had."""
    try:
        async with session.get(url, allow_redirects=False) as answer:
            if answer.status != 200:
                elsewhere = _elsewhere(answer)
                return None, f"{url} answers {answer.status}{': ' if elsewhere else ''}{elsewhere}"
            return await _text(answer), ""
    except TimeoutError:
        return None, f"{url} does not answer"
    except (aiohttp.ClientError, OSError) as error:
        return None, f"{url}: {error or type(error).__name__}"


def _elsewhere(answer: aiohttp.ClientResponse) -> str:
    """Return what a redirect says, empty for another answer.

    None is followed: whoever may give a pod labels would choose whom the operator's requests go to.
    """
    place = answer.headers.get("location") if 300 <= answer.status < 400 else None
    return "" if place is None else f"it redirects to {cut(place)}, where the operator doesn't follow"


async def _text(answer: aiohttp.ClientResponse) -> str:
    """Return the body, cut off where no honest one is as long."""
    parts = bytearray()
    async for part in answer.content.iter_chunked(1 << 16):
        parts += part
        if len(parts) > _MAX_BYTES:
            break
    return bytes(parts).decode("utf-8", "replace")


def _pages(
    request: Request,
    before: Mapping[str, Reading | None],
    after: Mapping[str, Reading | None],
    unread: Mapping[str, str],
) -> dict[Role, Pages]:
    result: dict[Role, Pages] = {}
    for role in Role:
        pods = [engine.pod for engine in request.engines if engine.role is role]
        result[role] = Pages(
            before={pod: before.get(pod) for pod in pods},
            after={pod: after.get(pod) for pod in pods},
            unread={pod: unread[pod] for pod in pods if pod in unread},
        )
    return result


def _nothing(request: Request) -> Evidence:
    return Evidence(request.num_tokens, Answer(None, "not asked", is_reached=False), _pages(request, {}, {}, {}))
