"""The connector in the engine's scheduler process: which requests take part in a transfer, and the workers' work.

Every method is called on the engine core's thread and must not block. vLLM's objects come in as protocols.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dcp_connector.errors import ParamsError, Reason
from dcp_connector.params import Fetch, HandOff, Plain, answer, parse
from dcp_connector.quarantine import BlockPool, Quarantine
from dcp_connector.requests_decode import Load
from dcp_connector.requests_prefill import Hold
from dcp_connector.stats import Counters
from dcp_connector.units import cdiv
from dcp_connector.wire import token_digest
from dcp_connector.work import RankReport, StepWork, merge_outcomes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

logger = logging.getLogger(__name__)

#: Reasons that are a matter of time: a lease or a deadline ran out.
_EXPIRIES = (Reason.LEASE_EXPIRED, Reason.DEADLINE)
#: Transfer ids remembered to refuse a second use.
MAX_USED_IDS = 65536


class Request(Protocol):
    """vLLM's Request, as far as it is read."""

    request_id: str
    kv_transfer_params: Any
    prompt_token_ids: Sequence[int] | None
    num_prompt_tokens: int
    num_computed_tokens: int
    lora_request: Any


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this engine is. `virtual_block_size` is B*W: tokens that one entry of a block table covers.

    `recomputes` tells what becomes of a request whose KV didn't come: it is computed here, or it ends with an error.
    """

    engine_id: str
    bootstrap_addr: str
    is_producer: bool
    is_consumer: bool
    virtual_block_size: int
    recomputes: bool = True


@dataclass(slots=True)
class _Seen:
    """A request that the engine knows."""

    part: Plain | HandOff | Fetch
    #: blocks were allocated once: the remote prefill was started, or found unnecessary
    decided: bool = False
    refused: bool = False
    #: why prefill's KV can't be fetched, although it should be
    unfetched: Reason | None = None
    #: prompt tokens that were in this engine's own prefix cache when vLLM asked last
    cached: int = 0


@dataclass(frozen=True, slots=True)
class _Loading:
    """A request whose KV is on its way: since when, by this object's clock, how many tokens, and into which blocks."""

    num_tokens: int
    since: float
    block_ids: tuple[int, ...]


class SchedulerSide:
    """Decides. `new_id` mints transfer ids, `clock` is monotonic."""

    def __init__(
        self,
        me: Identity,
        counters: Counters,
        new_id: Callable[[], str],
        used_for_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._me = me
        self._counters = counters
        self._new_id = new_id
        self._clock = clock
        self._used_for_s = used_for_s
        self._seen: dict[str, _Seen] = {}
        self._loading: dict[str, _Loading] = {}
        #: blocks held, by request and in all
        self._pinned: dict[str, int] = {}
        self._num_pinned_blocks = 0
        self._used: OrderedDict[str, float] = OrderedDict()
        #: since when the engine computes a step that has not ended
        self._step_since: float | None = None
        self._quarantine = Quarantine()
        self._work = StepWork()
        self._report = RankReport()

    def on_new_request(self, request: Request) -> None:
        """The engine took a request in."""
        self._look(request)

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Return (tokens to fetch beyond `num_computed_tokens`, whether they come asynchronously). May be asked again.

        All prompt tokens are fetched; vLLM then recomputes the last one, for its logits. If only that one is missing
        there is nothing to fetch.
        """
        seen = self._look(request)
        seen.cached = num_computed_tokens
        if not isinstance(seen.part, Fetch) or seen.decided:
            return 0, False
        available = min(request.num_prompt_tokens, seen.part.num_tokens or request.num_prompt_tokens)
        if num_computed_tokens >= min(available, request.num_prompt_tokens - 1):
            return 0, False
        return available - num_computed_tokens, True

    def allocated(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Blocks are allocated. vLLM calls this again when the request resumes: only the first call decides."""
        seen = self._look(request)
        if seen.decided:
            return
        seen.decided = True
        if not isinstance(seen.part, Fetch):
            if seen.unfetched is not None:
                self._counters.add("tokens_recomputed", request.num_prompt_tokens - seen.cached, seen.unfetched)
            return
        fetch = seen.part
        if num_external_tokens <= 0:
            self._counters.add("transfers", 1, "skipped")
            self._release(fetch)
            return
        available = min(request.num_prompt_tokens, fetch.num_tokens or request.num_prompt_tokens)
        start = max(0, available - num_external_tokens)
        table = tuple(block_ids[: cdiv(available, self._me.virtual_block_size)])
        fetched = table[start // self._me.virtual_block_size :]
        self._loading[request.request_id] = _Loading(num_external_tokens, self._clock(), fetched)
        self._work.loads.append(
            Load(
                request_id=request.request_id,
                transfer_id=fetch.transfer_id,
                bootstrap_addr=fetch.bootstrap_addr,
                engine_id=fetch.engine_id,
                block_ids=table,
                start=start,
                end=available,
                digest=token_digest(_token_bytes(request)[: 4 * available], _adapter(request)),
            )
        )

    def finished(
        self, request: Request, block_ids: Sequence[int], *, handed_off: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended. Returns (whether its blocks must stay, parameters for the response).

        `handed_off` tells that it ended normally, by length, stop string or end-of-sequence, so its KV is complete.
        """
        seen = self._look(request)
        del self._seen[request.request_id]
        match seen.part:
            case Fetch():
                if not seen.decided:
                    self._counters.add("transfers", 1, "released")
                    self._release(seen.part)
                elif request.request_id in self._loading:
                    self._stop(request.request_id)
            case HandOff() if not seen.refused:
                return self._hand_off(request, seen.part, block_ids, handed_off=handed_off)
            case _:
                pass
        return False, None

    def bind_blocks(self, pool: BlockPool) -> None:
        """Take vLLM's pool of blocks: those that a writer may still write into are kept out of it."""
        self._quarantine.bind(pool)

    def step_begins(self, num_tokens: int) -> None:
        """The engine begins to compute a step of so many tokens. Steps without tokens wait for nothing."""
        if num_tokens > 0 and self._step_since is None:
            self._step_since = self._clock()

    def step_ended(self) -> None:
        """A step's tokens are computed."""
        self._step_since = None

    @property
    def stalled_s(self) -> float:
        """Seconds that the present step takes already; 0 between steps. Any thread."""
        since = self._step_since
        return 0.0 if since is None else self._clock() - since

    def take_work(self) -> StepWork:
        """Return what came up since the last step."""
        work, self._work = self._work, StepWork()
        return work

    def has_work(self) -> bool:
        """Tell whether the next step has something for the workers."""
        return not self._work.is_empty()

    def settle(self, report: RankReport | None, sent: Iterable[str], received: Iterable[str]) -> None:
        """Workers reported. `sent` and `received` are requests that all ranks are done with."""
        if report is not None:
            self._note(report, frozenset(received))
        for request_id in received:
            loading = self._loading.pop(request_id, None)
            reason = self._report.received.pop(request_id, None)
            self._count("received", reason)
            if loading is not None:
                self._count_load(loading, reason)
        for request_id in sent:
            self._num_pinned_blocks -= self._pinned.pop(request_id, 0)
            self._count("sent", self._report.sent.pop(request_id, None))
            self._show_pinned()

    def _note(self, report: RankReport, received: frozenset[str]) -> None:
        """Act on what ranks say of requests that other ranks may not be done with."""
        self._report.sent = merge_outcomes(self._report.sent, report.sent)
        self._report.received = merge_outcomes(self._report.received, report.received)
        for request_id, num_ranks in report.unclear.items():
            loading = self._loading.get(request_id)
            if loading is not None:
                self._quarantine.put(request_id, loading.block_ids, num_ranks)
        for request_id, num_ranks in report.cleared.items():
            self._quarantine.clear(request_id, num_ranks)
        if report.unclear or report.cleared:
            self._counters.set("quarantined_blocks", self._quarantine.num_blocks)
        for request_id, reason in report.received.items():
            if reason is not None and request_id in self._loading and request_id not in received:
                # What one rank didn't get is computed again on all of them, or the request fails: the others may stop.
                self._stop(request_id)

    def _stop(self, request_id: str) -> None:
        """Let all ranks stop loading a request."""
        if request_id not in self._work.aborts:
            self._work.aborts.append(request_id)

    def _count(self, good: str, reason: Reason | None) -> None:
        if reason is None:
            self._counters.add("transfers", 1, good)
        elif reason is Reason.RELEASED:
            self._counters.add("transfers", 1, "released")
        elif reason is Reason.CANCELLED:
            self._counters.add("transfers", 1, "aborted")
        else:
            self._counters.add("transfers", 1, "expired" if reason in _EXPIRIES else "failed")
            self._counters.add("failed", 1, reason)

    def _count_load(self, loading: _Loading, reason: Reason | None) -> None:
        if reason is None:
            self._counters.add("tokens_received", loading.num_tokens)
            self._counters.sample("receive_seconds", self._clock() - loading.since)
        elif self._me.recomputes and reason is not Reason.CANCELLED:
            self._counters.add("tokens_recomputed", loading.num_tokens, reason)

    def _show_pinned(self) -> None:
        self._counters.set("pinned_requests", len(self._pinned))
        self._counters.set("pinned_blocks", self._num_pinned_blocks)

    def _hand_off(
        self, request: Request, part: HandOff, block_ids: Sequence[int], *, handed_off: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        num_tokens = request.num_prompt_tokens
        if not handed_off or request.num_computed_tokens < num_tokens or not block_ids:
            if part.transfer_id is not None:
                self._work.drops.append((part.transfer_id, Reason.PREFILL_ABORTED))
                self._counters.add("failed", 1, Reason.PREFILL_ABORTED)
                self._counters.add("transfers", 1, "failed")
            return False, None
        transfer_id = part.transfer_id or self._new_id()
        self._work.holds.append(
            Hold(
                request_id=request.request_id,
                transfer_id=transfer_id,
                # vLLM may list look-ahead blocks beyond the prompt, and counts B instead of B*W when it clips.
                block_ids=tuple(block_ids[: cdiv(num_tokens, self._me.virtual_block_size)]),
                num_tokens=num_tokens,
                tokens=_token_bytes(request),
                adapter=_adapter(request),
            )
        )
        self._pinned[request.request_id] = len(block_ids)
        self._num_pinned_blocks += len(block_ids)
        self._show_pinned()
        return True, answer(transfer_id, self._me.bootstrap_addr, self._me.engine_id, num_tokens)

    def _look(self, request: Request) -> _Seen:
        """Return what is known of a request, reading its parameters the first time."""
        seen = self._seen.get(request.request_id)
        if seen is None:
            seen = self._seen[request.request_id] = self._read(request)
            if isinstance(seen.part, HandOff) and seen.part.transfer_id is not None:
                seen.refused = not self._use(seen.part.transfer_id, request.request_id)
        return seen

    def _read(self, request: Request) -> _Seen:
        """Find out this engine's part. Nonsense is counted and makes a plain request; it never stops the engine."""
        try:
            part = parse(request.kv_transfer_params)
            self._check_role(part)
        except ParamsError as error:
            logger.warning("dcp: request %s is treated as a plain one: %s", request.request_id, error)
            self._counters.add("failed", 1, Reason.PARAMS_MALFORMED)
            return _Seen(Plain(), unfetched=Reason.PARAMS_MALFORMED if self._me.is_consumer else None)
        if isinstance(part, Plain) and self._me.is_consumer and not self._me.is_producer:
            logger.info("dcp: request %s names no remote prefill: it is computed here", request.request_id)
            self._counters.add("failed", 1, Reason.PARAMS_MISSING)
            return _Seen(part, unfetched=Reason.PARAMS_MISSING)
        return _Seen(part)

    def _check_role(self, part: Plain | HandOff | Fetch) -> None:
        if isinstance(part, HandOff) and not self._me.is_producer:
            raise ParamsError("do_remote_decode reached a kv_consumer engine: the router has the roles mixed up")
        if isinstance(part, Fetch) and not self._me.is_consumer:
            raise ParamsError("do_remote_prefill reached a kv_producer engine: the router has the roles mixed up")

    def _use(self, transfer_id: str, request_id: str) -> bool:
        """Remember a transfer id; return False when it was used before."""
        now = self._clock()
        while self._used and (len(self._used) > MAX_USED_IDS or next(iter(self._used.values())) < now):
            self._used.popitem(last=False)
        if transfer_id in self._used:
            logger.warning(
                "dcp: request %s uses transfer id %s again; its KV is not handed off", request_id, transfer_id
            )
            self._counters.add("failed", 1, Reason.REUSED_TRANSFER_ID)
            return False
        self._used[transfer_id] = now + self._used_for_s
        return True

    def _release(self, fetch: Fetch) -> None:
        self._work.releases.append((fetch.transfer_id, fetch.bootstrap_addr, fetch.engine_id))


def _token_bytes(request: Request) -> bytes:
    """Return the prompt's ids as little-endian int32; empty for a prompt that was given as embeddings."""
    return np.asarray(request.prompt_token_ids or (), dtype="<i4").tobytes()


def _adapter(request: Request) -> str:
    return str(request.lora_request.lora_name) if request.lora_request is not None else ""
