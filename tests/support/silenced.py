"""A real prefill engine behind a man in the middle who keeps back some kinds of words between it and decode.

Without a word that its chunks were taken, prefill stops writing when the slots that decode granted are full: the load
ends at decode's deadline with a part of it written, each time the same.
"""

import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from typing_extensions import override

from dcp_connector.bootstrap import BootstrapServer, fetch_topology
from dcp_connector.keys import KeyFile
from tests.support.control_proxy import ControlProxy, Weather
from tests.support.engines import RunningEngine

__all__ = ["Silencer", "silenced"]

#: A frame's header and code, see `dcp_connector.wire`; behind them is a map with the kind under "k".
_BEFORE_PAYLOAD = 60


class Silencer(ControlProxy):
    """Passes on everything but `kinds` ("taken", "cancel", ...), which may be replaced meanwhile."""

    def __init__(self, target: str, kinds: frozenset[str]) -> None:
        self.kinds = kinds
        #: messages kept back, by (kind, decode rank's identity)
        self.kept: Counter[tuple[str, bytes]] = Counter()
        super().__init__(target, Weather(), seed=0)

    @override
    def _take(self, identity: bytes, message: bytes, to_prefill: bool) -> None:
        kind = msgspec.msgpack.decode(message[_BEFORE_PAYLOAD:])["k"]
        if kind in self.kinds:
            self.kept[kind, identity] += 1
        else:
            super()._take(identity, message, to_prefill)


@contextmanager
def silenced(prefill: RunningEngine, *kinds: str) -> Iterator[tuple[str, Silencer]]:
    """Put a silencer before a prefill engine of one rank; gives the bootstrap address at which decode meets it."""
    secret = KeyFile(prefill.group.log_file.with_name("secret"))
    topology = fetch_topology(str(prefill.bootstrap_url), secret)
    (rank,) = topology.ranks
    silencer = Silencer(rank.control, frozenset(kinds))
    server = BootstrapServer(0, 1, secret, serves_query=True)
    try:
        behind = msgspec.structs.replace(rank, control=silencer.address)
        # Another start of the engine, as decode sees it: else it would keep to the control address that it knows.
        server.publish(msgspec.structs.replace(topology, generation=uuid.uuid4().hex, ranks=[behind]))
        yield f"http://127.0.0.1:{server.port}", silencer
    finally:
        server.close()
        silencer.close()
