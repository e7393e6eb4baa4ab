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
from dcp_connector.handshake import find_mismatches, side_layout
from dcp_connector.mapping import destinations, sources
from dcp_connector.requests_decode import Ask, Load
from dcp_connector.tiling import verify_tiling
from dcp_connector.units import LayoutError
from dcp_connector.wire import Pull, Release

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcp_connector.geometry import SideLayout
    from dcp_connector.handshake import RankFacts, Topology

logger = logging.getLogger(__name__)

#: Engines remembered at most, the least recently used go first.
MAX_PEERS = 1024
#: Pause before a bootstrap server that names another engine id is asked once more.
_SECOND_LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class Peer:
    """A prefill engine that fits."""

    topology: Topology
    layout: SideLayout


class PeerBook:
    """Topologies by bootstrap address. Thread-safe; `find` may block on the network, `known` never does."""

    def __init__(self, facts: RankFacts, layout: SideLayout, secret: bytes) -> None:
        self._facts = facts
        self._layout = layout
        self._secret = secret
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._refused: OrderedDict[tuple[str, str], PeerError] = OrderedDict()
        self._fetching: dict[str, threading.Lock] = {}

    def known(self, origin: str, engine_id: str | None) -> Peer | None:
        """Return the peer if it was seen before and is still the engine that is asked for."""
        with self._lock:
            peer = self._peers.get(origin)
            if peer is None or engine_id not in (None, peer.topology.side.engine_id):
                return None
            self._peers.move_to_end(origin)
            return peer

    def forget(self, address: str) -> None:
        """A rank's control address broke: its engine may be gone, so the next load asks its bootstrap server again."""
        with self._lock:
            for origin, peer in list(self._peers.items()):
                if any(rank.control == address for rank in peer.topology.ranks):
                    del self._peers[origin]

    def find(self, origin: str, engine_id: str | None) -> Peer:
        """Return the peer, asking its bootstrap server. Raises PeerError with a reason of its own for each failure.

        Routers cache engine ids for ever. When the server names another one it is asked once more, because it may be
        about to restart, and then the load fails at once instead of waiting for a deadline.
        """
        with self._lock:
            gate = self._fetching.setdefault(origin, threading.Lock())
        with gate:
            peer = self.known(origin, engine_id)
            if peer is not None:
                return peer
            topology = fetch_topology(origin, self._secret)
            if engine_id not in (None, topology.side.engine_id):
                time.sleep(_SECOND_LOOK_S)
                topology = fetch_topology(origin, self._secret)
            if engine_id not in (None, topology.side.engine_id):
                raise PeerError(
                    Reason.STALE_ENGINE_ID,
                    f"the request names engine {engine_id}, but {origin} is engine {topology.side.engine_id} now: "
                    "the router holds an outdated engine id",
                )
            peer = self._accept(origin, topology)
            with self._lock:
                self._peers[origin] = peer
                while len(self._peers) > MAX_PEERS:
                    self._fetching.pop(self._peers.popitem(last=False)[0], None)
            return peer

    def _accept(self, origin: str, topology: Topology) -> Peer:
        """Check that the two sides fit; refuse in words, logged once per peer."""
        key = topology.side.engine_id, topology.generation
        known = self._refused.get(key)
        if known is not None:
            raise known
        problems = list(find_mismatches(topology, self._facts))
        if not problems:
            try:
                layout = side_layout(topology.side.layout)
                verify_tiling(layout, self._layout, self._facts.tp_rank)
            except LayoutError as error:
                problems.append(str(error))
            else:
                logger.info("dcp: prefill engine %s at %s fits: %s", key[0], origin, topology.side.layout)
                return Peer(topology, layout)
        refusal = PeerError(
            Reason.INCOMPATIBLE, f"prefill engine {key[0]} at {origin} doesn't fit: {'; '.join(problems)}"
        )
        logger.error("dcp: %s", refusal.detail)
        self._refused[key] = refusal
        while len(self._refused) > MAX_PEERS:
            self._refused.popitem(last=False)
        raise refusal


def plan_asks(
    peer: Peer, load: Load, facts: RankFacts, layout: SideLayout, segment: str, new_id: Callable[[], str]
) -> tuple[Ask, ...]:
    """Return the pulls of one load: one for each prefill rank, over all pipeline stages, that supplies this rank."""
    theirs = peer.topology
    needed = {source.prefill_rank for source in sources(peer.layout, layout, facts.tp_rank, load.transfer_id)}
    table = np.asarray(load.block_ids, dtype="<i8").tobytes()
    return tuple(
        Ask(
            rank.control,
            Pull(
                pull_id=new_id(),
                transfer_id=load.transfer_id,
                prefill_engine=theirs.side.engine_id,
                prefill_rank=rank.pp_rank * peer.layout.tensor_parallel_size + rank.tp_rank,
                decode_engine=facts.side.engine_id,
                decode_rank=facts.tp_rank,
                budget_s=0.0,
                start=load.start,
                end=load.end,
                digest=load.digest,
                layout=facts.side.layout,
                block_table=table,
                pages={name: page for name, page in facts.pages.items() if name in rank.pages},
                segment=segment,
            ),
        )
        for rank in theirs.ranks
        if rank.tp_rank in needed
    )


def plan_releases(
    peer: Peer, transfer_id: str, facts: RankFacts, layout: SideLayout | None, why: str
) -> tuple[tuple[str, Release], ...]:
    """Return what to send to the prefill ranks that serve nobody in this transfer, or to all of them without `layout`."""
    theirs = peer.topology
    return tuple(
        (rank.control, Release(transfer_id, theirs.side.engine_id, facts.side.engine_id, why))
        for rank in theirs.ranks
        if layout is None or not destinations(peer.layout, layout, rank.tp_rank, transfer_id)
    )
