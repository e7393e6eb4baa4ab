"""What a decode rank knows of prefill engines: topologies, whether they fit, and whom to ask for what."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dcp_connector.bootstrap import fetch_topology
from dcp_connector.errors import PeerError, Reason
from dcp_connector.handshake import find_mismatches, layers_of, pages_to_ask, side_layout
from dcp_connector.mapping import destinations, sources
from dcp_connector.page_sets import layer_of
from dcp_connector.requests_decode import Ask, Load
from dcp_connector.siblings import sibling_origin
from dcp_connector.tiling import verify_tiling
from dcp_connector.units import LayoutError
from dcp_connector.wire import Pull, Release

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcp_connector.geometry import SideLayout
    from dcp_connector.handshake import RankEntry, RankFacts, Topology
    from dcp_connector.wire import Secret

logger = logging.getLogger(__name__)

#: Engines remembered at most, the least recently used go first.
MAX_PEERS = 1024
#: Pause before a bootstrap server that names another engine id is asked once more.
_SECOND_LOOK_S = 0.25
#: For so long a failed look-up answers the next ones too, so that a dead or outdated address is cheap under load.
_FAILURE_LASTS_S = 1.5
_NUM_GATES = 64


@dataclass(frozen=True, slots=True)
class Peer:
    """A prefill engine that fits."""

    topology: Topology
    layout: SideLayout


class PeerBook:
    """Topologies by bootstrap address. Thread-safe. `find` and `topology` may wait for the network, `known` never.

    `on_refused` is called once for each start of a peer that doesn't fit.
    """

    def __init__(
        self, facts: RankFacts, layout: SideLayout, secret: Secret, on_refused: Callable[[], None] = lambda: None
    ) -> None:
        self._facts = facts
        self._layout = layout
        self._secret = secret
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._topologies: OrderedDict[str, Topology] = OrderedDict()
        self._verdicts: OrderedDict[tuple[str, str], Peer | PeerError] = OrderedDict()
        # Where a data-parallel rank listens that was asked for at another one's address.
        self._moved: OrderedDict[tuple[str, str | None], str] = OrderedDict()
        # By address, and by address and engine id where only that id is outdated.
        self._failures: OrderedDict[tuple[str, str | None], tuple[float, PeerError]] = OrderedDict()
        # Addresses come from requests, so there may be any number of them: the locks are shared out by hash.
        self._gates = [threading.Lock() for _ in range(_NUM_GATES)]

    def known(self, origin: str, engine_id: str | None) -> Peer | None:
        """Return the peer if it was seen before, fits, and is still the engine that is asked for."""
        with self._lock:
            topology = self._cached(self._moved.get((origin, engine_id), origin), engine_id)
            verdict = self._verdicts.get(_key(topology)) if topology else None
        return verdict if isinstance(verdict, Peer) else None

    def forget(self, address: str) -> None:
        """A rank's control address broke: its engine may be gone, so the next load asks its bootstrap server again."""
        with self._lock:
            for origin, topology in list(self._topologies.items()):
                if any(rank.control == address for rank in topology.ranks):
                    del self._topologies[origin]

    def find(self, origin: str, engine_id: str | None) -> Peer:
        """Return the peer. Raises PeerError with a reason of its own for each failure."""
        topology = self.topology(origin, engine_id)
        # Judged by one thread, whoever else waits for it, so that a peer is logged and counted once.
        with self._gates[hash(_key(topology)) % _NUM_GATES]:
            verdict = self._verdict(origin, topology)
        if isinstance(verdict, PeerError):
            raise PeerError(verdict.reason, verdict.detail)
        return verdict

    def _verdict(self, origin: str, topology: Topology) -> Peer | PeerError:
        """Return what was found when this start of the peer was first seen, or find it out now."""
        with self._lock:
            verdict = self._verdicts.get(_key(topology))
        if verdict is None:
            verdict = self._judge(origin, topology)
            with self._lock:
                self._verdicts[_key(topology)] = verdict
                while len(self._verdicts) > MAX_PEERS:
                    self._verdicts.popitem(last=False)
        return verdict

    def topology(self, origin: str, engine_id: str | None) -> Topology:
        """Return the engine behind an address, fitting or not; asks its bootstrap server if need be. Raises PeerError.

        Routers cache engine ids for ever. When the server names another one it is asked once more, because it may be
        about to restart, and then the load fails at once instead of waiting for a deadline. They also know one address
        only of an engine's data-parallel ranks: another rank than the one that is met there is looked for next to it.
        """
        with self._lock:
            moved = self._moved.get((origin, engine_id))
        if moved is None:
            found = self._look_up(origin, engine_id, siblings=True)
            if not isinstance(found, str):
                return found
            moved = found
            with self._lock:
                self._moved[origin, engine_id] = moved
                while len(self._moved) > MAX_PEERS:
                    self._moved.popitem(last=False)
        found = self._look_up(moved, engine_id, siblings=False)
        assert not isinstance(found, str), "only asked for with siblings"
        return found

    def _look_up(self, origin: str, engine_id: str | None, *, siblings: bool) -> Topology | str:
        """Return the engine, or with `siblings` the address at which that data-parallel rank is to be looked for."""
        asked = time.monotonic()
        known = self._remembered(origin, engine_id, asked)
        if known is not None:
            return known
        with self._gates[hash(origin) % _NUM_GATES]:
            # Someone else may have asked while we waited for our turn: a dead address costs one timeout, not many.
            known = self._remembered(origin, engine_id, asked)
            if known is not None:
                return known
            topology = self._fetch(origin)
            elsewhere = sibling_origin(origin, topology.side.engine_id, engine_id) if siblings and engine_id else None
            if elsewhere is not None:
                return elsewhere
            if engine_id not in (None, topology.side.engine_id):
                time.sleep(_SECOND_LOOK_S)
                topology = self._fetch(origin)
            if engine_id not in (None, topology.side.engine_id):
                stale = PeerError(
                    Reason.STALE_ENGINE_ID,
                    f"the request names engine {engine_id}, but {origin} is engine {topology.side.engine_id} now: "
                    "the router holds an outdated engine id",
                )
                self._remember_failure(origin, engine_id, stale)
                raise stale
            return topology

    def _remembered(self, origin: str, engine_id: str | None, asked: float) -> Topology | None:
        """Return the topology if it is known. Raises PeerError if finding it failed a moment ago, or since `asked`."""
        since = min(asked, time.monotonic() - _FAILURE_LASTS_S)
        with self._lock:
            cached = self._cached(origin, engine_id)
            if cached is not None:
                return cached
            failures = [self._failures.get((origin, which)) for which in (None, engine_id)]
        for found in failures:
            if found is not None and found[0] > since:
                raise PeerError(found[1].reason, found[1].detail)
        return None

    def _fetch(self, origin: str) -> Topology:
        """Ask the server; what it answers is kept, whichever engine it is. Raises PeerError."""
        try:
            topology = fetch_topology(origin, self._secret)
        except PeerError as error:
            self._remember_failure(origin, None, error)
            raise
        with self._lock:
            self._topologies[origin] = topology
            while len(self._topologies) > MAX_PEERS:
                self._topologies.popitem(last=False)
        return topology

    def _remember_failure(self, origin: str, engine_id: str | None, error: PeerError) -> None:
        with self._lock:
            self._failures[origin, engine_id] = time.monotonic(), error
            while len(self._failures) > MAX_PEERS:
                self._failures.popitem(last=False)

    def _cached(self, origin: str, engine_id: str | None) -> Topology | None:
        topology = self._topologies.get(origin)
        if topology is None or engine_id not in (None, topology.side.engine_id):
            return None
        self._topologies.move_to_end(origin)
        return topology

    def _judge(self, origin: str, topology: Topology) -> Peer | PeerError:
        """Check that the two sides fit; a refusal says why in words and is logged, once per peer."""
        engine_id, _ = _key(topology)
        problems = list(find_mismatches(topology, self._facts))
        if not problems:
            try:
                layout = side_layout(topology.side.layout)
                verify_tiling(layout, self._layout, self._facts.tp_rank)
            except LayoutError as error:
                problems.append(str(error))
            else:
                logger.info("dcp: prefill engine %s at %s fits: %s", engine_id, origin, topology.side.layout)
                return Peer(topology, layout)
        words = f"prefill engine {engine_id} at {origin} doesn't fit: {'; '.join(problems)}"
        logger.error("dcp: %s", words)
        self._on_refused()
        return PeerError(Reason.INCOMPATIBLE, words)


def _key(topology: Topology) -> tuple[str, str]:
    return topology.side.engine_id, topology.generation


def plan_asks(
    peer: Peer, load: Load, facts: RankFacts, layout: SideLayout, segment: str, new_id: Callable[[], str]
) -> tuple[Ask, ...]:
    """Return the pulls of one load: one for each prefill rank, over all pipeline stages, that supplies this rank.

    A stage of prefill that has none of this rank's layers is asked too, for nothing: it serves the other stages of this
    engine, and counts tensor ranks and stages until all have asked. So neither side needs to know who has which layer.
    """
    theirs = peer.topology
    needed = {source.prefill_rank for source in sources(peer.layout, layout, facts.tp_rank, load.transfer_id)}
    wanted = pages_to_ask(theirs, facts)
    table = np.asarray(load.block_ids, dtype="<i8").tobytes()
    return tuple(
        Ask(
            rank.control,
            Pull(
                pull_id=new_id(),
                transfer_id=load.transfer_id,
                prefill_engine=theirs.side.engine_id,
                prefill_rank=_number(theirs, rank),
                decode_engine=facts.side.engine_id,
                decode_rank=facts.pp_rank * layout.tensor_parallel_size + facts.tp_rank,
                budget_s=0.0,
                start=load.start,
                end=load.end,
                digest=load.digest,
                layout=facts.side.layout,
                block_table=table,
                pages={name: page for name, page in wanted.items() if layer_of(name) in layers_of(rank)},
                segment=segment,
                decode_stages=facts.side.pipeline_parallel_size,
            ),
        )
        for rank in theirs.ranks
        if rank.tp_rank in needed
    )


def releases_to_idle_ranks(
    peer: Peer, transfer_id: str, facts: RankFacts, layout: SideLayout
) -> tuple[tuple[str, Release], ...]:
    """Return what to send to the prefill ranks that serve nobody in this transfer, so that they don't wait."""
    theirs = peer.topology
    return tuple(
        (rank.control, _release(theirs, rank, transfer_id, facts, "this rank serves nobody"))
        for rank in theirs.ranks
        if not destinations(peer.layout, layout, rank.tp_rank, transfer_id)
    )


def releases_to_all_ranks(
    topology: Topology, transfer_id: str, facts: RankFacts, why: str
) -> tuple[tuple[str, Release], ...]:
    """Return what to send to every prefill rank when nothing is needed."""
    return tuple((rank.control, _release(topology, rank, transfer_id, facts, why)) for rank in topology.ranks)


def _release(topology: Topology, rank: RankEntry, transfer_id: str, facts: RankFacts, why: str) -> Release:
    return Release(transfer_id, topology.side.engine_id, _number(topology, rank), facts.side.engine_id, why)


def _number(topology: Topology, rank: RankEntry) -> int:
    """Return a prefill rank's number over stages and tensor ranks, as in `Pull.prefill_rank`."""
    return rank.pp_rank * topology.side.layout.tensor_parallel_size + rank.tp_rank
