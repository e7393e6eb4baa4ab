"""The closed list of reasons: the same word in a condition, an event and a log line."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Reason(StrEnum):
    """Why a condition has its status. Members are ordered: of several problems the first one here is reported."""

    # What keeps the operator from acting on the spec at all.
    INVALID_SPEC = "InvalidSpec"
    # What keeps it from writing.
    PERMISSION_DENIED = "PermissionDenied"
    NAME_TAKEN = "NameTaken"
    APPLY_REJECTED = "ApplyRejected"
    API_UNAVAILABLE = "ApiUnavailable"
    GROUPS_UNAVAILABLE = "GroupsUnavailable"
    # What keeps pods from existing, starting, or answering.
    MODEL_PULL_FAILED = "ModelPullFailed"
    PODS_REFUSED = "PodsRefused"
    CONNECTOR_MISSING = "ConnectorMissing"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CONTAINER_REFUSED = "ContainerRefused"
    MODEL_LOAD_FAILED = "ModelLoadFailed"
    CRASH_LOOP = "CrashLoop"
    UNSCHEDULABLE = "Unschedulable"
    NODE_LOST = "NodeLost"
    PROBE_FAILED = "ProbeFailed"
    SCALED_TO_ZERO = "ScaledToZero"
    # What keeps KV from moving although pods are ready.
    NO_KV_CONNECTOR = "NoKVConnector"
    HANDSHAKE_REFUSED = "HandshakeRefused"
    TRANSFER_FAILED = "TransferFailed"
    RECOMPUTED = "Recomputed"
    # What somebody asked for.
    PAUSED = "Paused"
    # What takes its time.
    MODEL_PULLING = "ModelPulling"
    STARTING = "Starting"
    PODS_PENDING = "PodsPending"
    WAITING_FOR_ENGINES = "WaitingForEngines"
    ROLLING_OUT = "RollingOut"
    CAPACITY_BELOW_FLOOR = "CapacityBelowFloor"
    # What is unknown.
    MODEL_UNKNOWN = "ModelUnknown"
    NOT_CHECKED = "NotChecked"
    DISABLED = "Disabled"
    NO_COUNTERS = "ConnectorHasNoCounters"
    # What happened, beside what is: events alone.
    ENGINE_RESTARTED = "EngineRestarted"
    GROUP_RECREATED = "GroupRecreated"
    # What is well.
    RULES_PASSED = "RulesPassed"
    PODS_READY = "PodsReady"
    ROLLED_OUT = "RolledOut"
    SERVING = "Serving"
    OWN_ROUTER = "OwnRouter"
    VERIFIED = "Verified"

    @property
    def rank(self) -> int:
        """Position in the list; lower is reported first."""
        return _RANKS[self]

    @property
    def is_progress(self) -> bool:
        """Whether waiting is all that is needed."""
        return self in _PROGRESS


_RANKS = {reason: index for index, reason in enumerate(Reason)}
_PROGRESS = frozenset(
    {Reason.MODEL_PULLING, Reason.STARTING, Reason.PODS_PENDING, Reason.WAITING_FOR_ENGINES, Reason.ROLLING_OUT}
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as it should be: the reason, and in words what was found, why, and what to do."""

    reason: Reason
    message: str


#: What a condition can be.
Verdict = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True)
class Said:
    """What one condition says."""

    status: Verdict
    reason: Reason
    message: str
