"""Why a transfer can fail: one closed list of reasons, one exception tree.

The same word is used by the control channel, the log, and the `reason` label of `vllm:dcp_kv_failed_transfers_total`.
"""

from enum import StrEnum


class Reason(StrEnum):
    """Everything that can end a transfer without its KV arriving. Values are label values: never rename one."""

    #: decode got no parameters for a remote prefill, although it is a consumer: it computed the prompt itself.
    PARAMS_MISSING = "params_missing"
    #: `kv_transfer_params` has wrong types or contradicts itself.
    PARAMS_MALFORMED = "params_malformed"
    #: the transfer id was used before, or by another engine at the same time.
    REUSED_TRANSFER_ID = "reused_transfer_id"
    #: the bootstrap server did not answer.
    BOOTSTRAP_UNREACHABLE = "bootstrap_unreachable"
    #: the bootstrap server answered something that is not a signed handshake of this protocol.
    BOOTSTRAP_GARBAGE = "bootstrap_garbage"
    #: the request names an engine id that the bootstrap server doesn't know (any more).
    STALE_ENGINE_ID = "stale_engine_id"
    #: the two sides' facts do not fit together.
    INCOMPATIBLE = "incompatible"
    #: the control connection to a prefill rank broke or could not be made.
    PEER_LOST = "peer_lost"
    #: the KV did not arrive within the deadline.
    DEADLINE = "deadline"
    #: the prefill request was aborted or refused.
    PREFILL_ABORTED = "prefill_aborted"
    #: nobody asked for the KV within the lease.
    LEASE_EXPIRED = "lease_expired"
    #: the blocks were given back because decode said that it needs nothing.
    RELEASED = "released"
    #: prefill holds the KV of other tokens under this transfer id.
    OTHER_PROMPT = "other_prompt"
    #: prefill computed fewer tokens than decode asks for.
    SHORT_PROMPT = "short_prompt"
    #: a block id or an address range lies outside the pages that were announced.
    OUT_OF_BOUNDS = "out_of_bounds"
    #: the TransferEngine reported a failure.
    TRANSFER_ERROR = "transfer_error"
    #: decode gave the request up (client gone).
    CANCELLED = "cancelled"
    #: a bug in this connector; the log has the details.
    INTERNAL = "internal"


class ConnectorError(Exception):
    """Base of everything that this package raises on purpose. The text is one sentence for an operator."""


class StartupError(ConnectorError):
    """The engine must not start: a setting, a file or a library is missing or wrong."""


class WireError(ConnectorError):
    """Bytes from a peer are not a message of this protocol, or not an authentic one."""


class ParamsError(ConnectorError):
    """`kv_transfer_params` of a request can't be understood."""


class PeerError(ConnectorError):
    """A transfer with one peer failed for a known reason."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
