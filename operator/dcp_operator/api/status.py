"""`status` of a DCPDisaggDeployment: what the operator observed. Users read it, only the operator writes it."""

from typing import Literal

from pydantic import Field

from dcp_operator.api.base import ApiModel


class Condition(ApiModel):
    """One condition, in the form of metav1.Condition."""

    type: str = Field(description="Name of the condition.")
    status: Literal["True", "False", "Unknown"] = Field(description="True, False or Unknown.")
    reason: str = Field(description="One word from a closed list that says why.")
    message: str = Field(description="What was found and what to do about it.")
    last_transition_time: str = Field(
        description="When status last changed, RFC 3339.", json_schema_extra={"format": "date-time"}
    )
    observed_generation: int | None = Field(
        default=None, description="metadata.generation that the condition speaks about."
    )


class RoleStatus(ApiModel):
    """Pods of one role, over all revisions: those that exist and neither end nor have ended."""

    replicas: int = Field(default=0, description="Pods that exist.")
    ready_replicas: int = Field(default=0, description="Pods that are ready.")
    updated_replicas: int = Field(
        default=0,
        description="Pods of the present spec's revision. A change that keeps the revision, such as that of a sidecar, "
        "doesn't show here.",
    )
    scheduled_replicas: int = Field(default=0, description="Pods that have a node.")


class RevisionStatus(ApiModel):
    """One revision during a rollout."""

    revision: str = Field(description="Name of the revision.")
    share: str = Field(
        description="Part of the wanted capacity that its ready engines and router give, in percent rounded down, such "
        "as 50%."
    )
    prefill: int = Field(description="Prefill engines of the revision that are ready.")
    decode: int = Field(description="Decode engines of the revision that are ready.")
    router: int = Field(description="Routers of the revision that are ready.")


class RolloutStatus(ApiModel):
    """A rollout that is under way; absent when one revision is all there is."""

    revisions: list[RevisionStatus] = Field(
        default_factory=list[RevisionStatus], description="Revisions that have pods or workloads, oldest first."
    )
    waiting_for: str | None = Field(default=None, description="What the next step of the rollout waits for, in words.")


class TransferCheckStatus(ApiModel):
    """The last check that told something about the KV transfer; KVTransferVerified says what."""

    revision: str = Field(description="Revision that was checked.")
    engines: str = Field(description="Stands for the engines that were ready, and for their starts.")
    last_time: str = Field(description="When it was, RFC 3339.", json_schema_extra={"format": "date-time"})


class ResolvedRole(ApiModel):
    """Engine settings of one role after defaults and derivation: what the engine is told."""

    tensor: int = Field(description="Tensor parallel size.")
    decode_context: int = Field(description="Decode context parallel size.")
    block_size: int = Field(description="Tokens in one KV block of one rank.")
    kv_cache_interleave_size: int = Field(description="Tokens per turn of a decode-context rank.")
    accelerators: int = Field(description="Accelerators of one pod; 0 on CPU.")
    max_model_len: int | None = Field(default=None, description="Longest context, in tokens, where it is known.")


class Resolved(ApiModel):
    """Engine settings of both roles."""

    prefill: ResolvedRole = Field(description="Settings of the prefill engines.")
    decode: ResolvedRole = Field(description="Settings of the decode engines.")
    kv_capacity_gain: str = Field(
        description="How many times more tokens fit into a decode engine's KV cache than with decodeContext 1, such as "
        "8x."
    )


class Status(ApiModel):
    """What the operator observed."""

    observed_generation: int | None = Field(
        default=None, description="metadata.generation that this status speaks about."
    )
    conditions: list[Condition] = Field(
        default_factory=list[Condition],
        description="Ready, Available, Progressing, PrefillReady, DecodeReady, RouterReady, ConfigCompatible and "
        "KVTransferVerified.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    current_revision: str | None = Field(
        default=None,
        description="Revision that serves requests: that of the present spec if it does, else the newest that does.",
    )
    update_revision: str | None = Field(
        default=None, description="Revision of the present spec; none while the spec is refused."
    )
    prefill: RoleStatus = Field(default_factory=RoleStatus, description="Pods of the prefill role.")
    decode: RoleStatus = Field(default_factory=RoleStatus, description="Pods of the decode role.")
    router: RoleStatus = Field(default_factory=RoleStatus, description="Pods of the router.")
    rollout: RolloutStatus | None = Field(default=None, description="The rollout that is under way, if one is.")
    transfer_check: TransferCheckStatus | None = Field(
        default=None, description="The last check of the KV transfer that told something."
    )
    resolved: Resolved | None = Field(default=None, description="Engine settings after defaults and derivation.")
    parallelism: str | None = Field(
        default=None,
        description="Tensor and decode context size of both roles, such as 4/1 -> 8/8, for the TP/DCP column.",
    )
