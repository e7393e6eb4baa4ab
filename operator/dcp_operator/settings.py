"""Engine settings of a role: the stated fields with everything derived filled in.

The only place where a default that depends on other fields is computed. Rules, builders and status read the result.
"""

from dataclasses import dataclass
from enum import StrEnum

from dcp_operator.api.spec import CPU, RoleSpec, Spec


class Role(StrEnum):
    """The two sides of a disaggregated deployment; the value is the field's name and the label's value."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What one role's engine is told, in vLLM's words; sizes are numbers of ranks, lengths are tokens."""

    role: Role
    tensor: int
    pipeline: int
    data: int
    data_local: int
    expert: bool
    decode_context: int
    prefill_context: int
    block_size: int
    interleave: int
    dtype: str | None
    kv_cache_dtype: str | None
    max_model_len: int | None
    #: Pods of one engine.
    nodes: int
    accelerators_per_pod: int

    @property
    def ranks_per_pod(self) -> int:
        """Worker processes in one pod: tensor x prefillContext x pipeline x dataLocal / nodes.

        Decode context reuses ranks.
        """
        return self.tensor * self.prefill_context * self.pipeline * self.data_local // self.nodes


def role_spec(spec: Spec, role: Role) -> RoleSpec:
    """Return the part of the spec that describes one role."""
    return spec.prefill if role is Role.PREFILL else spec.decode


def resolve_role(spec: Spec, role: Role) -> EngineSettings:
    """Return one role's engine settings. Never fails: whether they make sense is for the rules to say."""
    stated = role_spec(spec, role)
    sizes = stated.parallelism
    geometry = spec.model.geometry
    data_local = sizes.data_local if sizes.data_local is not None else sizes.data
    ranks = sizes.tensor * sizes.prefill_context * sizes.pipeline * data_local
    nodes = 1 if stated.multinode is None else stated.multinode.node_count
    return EngineSettings(
        role=role,
        tensor=sizes.tensor,
        pipeline=sizes.pipeline,
        data=sizes.data,
        data_local=data_local,
        expert=sizes.expert,
        decode_context=sizes.decode_context,
        prefill_context=sizes.prefill_context,
        block_size=stated.block_size,
        interleave=stated.kv_cache_interleave_size or stated.block_size,
        dtype=stated.dtype,
        kv_cache_dtype=stated.kv_cache_dtype,
        max_model_len=stated.max_model_len or (geometry.max_model_len if geometry else None),
        nodes=nodes,
        accelerators_per_pod=0 if spec.accelerator.resource_name == CPU else ranks // nodes,
    )


def resolve(spec: Spec) -> dict[Role, EngineSettings]:
    """Return the engine settings of both roles."""
    return {role: resolve_role(spec, role) for role in Role}
