"""Whether a prefill rank may serve a pull out of a prompt that it holds, and whom else it serves with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_connector.errors import PeerError, Reason
from dcp_connector.handshake import side_layout
from dcp_connector.mapping import destinations
from dcp_connector.units import LayoutError
from dcp_connector.wire import Pull, token_digest

if TYPE_CHECKING:
    from dcp_connector.geometry import SideLayout
    from dcp_connector.requests_prefill import Hold

__all__ = ["MAX_RANKS", "admit"]

#: Ranks of one decode engine, over all pipeline stages; more are a mistake, and would be remembered for each transfer.
MAX_RANKS = 16384


def admit(pull: Pull, hold: Hold, side: SideLayout, tp_rank: int) -> frozenset[int]:
    """Return the decode ranks that prefill's `tp_rank` serves in the pull's transfer.

    Ranks count as in `Pull.decode_rank`: stage * T + tensor rank. Raises PeerError if the pull may not run.
    """
    if pull.start >= pull.end:
        raise PeerError(Reason.OUT_OF_BOUNDS, f"decode asks for the tokens [{pull.start}, {pull.end})")
    if pull.end > hold.num_tokens:
        detail = f"decode asks for {pull.end} tokens, prefill computed {hold.num_tokens}"
        raise PeerError(Reason.SHORT_PROMPT, detail)
    if token_digest(hold.tokens[: 4 * pull.end], hold.adapter) != pull.digest:
        detail = f"transfer {hold.transfer_id} holds the KV of another prompt than the one that decode has"
        raise PeerError(Reason.OTHER_PROMPT, detail)
    num_ranks = pull.layout.tensor_parallel_size * pull.decode_stages
    if num_ranks > MAX_RANKS:
        raise PeerError(Reason.INCOMPATIBLE, f"decode has {num_ranks} ranks, at most {MAX_RANKS} are served")
    try:
        decode = side_layout(pull.layout)
        tensor_ranks = destinations(side, decode, tp_rank, pull.transfer_id)
    except LayoutError as error:
        raise PeerError(Reason.INCOMPATIBLE, str(error)) from error
    stages = range(pull.decode_stages)
    return frozenset(stage * decode.tensor_parallel_size + rank for stage in stages for rank in tensor_ranks)
