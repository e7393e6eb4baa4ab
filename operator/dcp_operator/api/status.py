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
    """Pods of one role, over all revisions."""

    replicas: int = Field(default=0, description="Pods that exist.")
    ready_replicas: int = Field(default=0, description="Pods that are ready.")
    updated_replicas: int = Field(default=0, description="Pods of the newest revision.")


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
        description="Ready, Progressing, PrefillReady, DecodeReady, RouterReady and ConfigCompatible.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    current_revision: str | None = Field(default=None, description="Revision that serves requests.")
    update_revision: str | None = Field(default=None, description="Revision of the present spec.")
    prefill: RoleStatus = Field(default_factory=RoleStatus, description="Pods of the prefill role.")
    decode: RoleStatus = Field(default_factory=RoleStatus, description="Pods of the decode role.")
    router: RoleStatus = Field(default_factory=RoleStatus, description="Pods of the router.")
    resolved: Resolved | None = Field(default=None, description="Engine settings after defaults and derivation.")
    parallelism: str | None = Field(
        default=None,
        description="Tensor and decode context size of both roles, such as 4/1 -> 8/8, for the TP/DCP column.",
    )
