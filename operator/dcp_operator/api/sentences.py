"""The sentences of the static rules: the one source of what the rule engine and the CRD's CEL rules say.

A sentence has `{name}` where a value of the object stands. `dcp_operator.rules` fills in the values, `api.cel` an
expression that does so on the API server. `{role}` is filled in by both.
"""

import re
from dataclasses import dataclass
from typing import Final

_PLACE: Final = re.compile(r" ?\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Sentence:
    """What one rule says about one field, behind the field's path."""

    text: str

    def say(self, **values: object) -> str:
        """Return the sentence with its values."""
        return self.text.format(**values)

    def places(self) -> list[str]:
        """Return the names of the values in the order in which they stand in the sentence."""
        return _PLACE.findall(self.text)

    def without_values(self) -> str:
        """Return the sentence for a place where values can't be shown."""
        return _PLACE.sub("", self.text).strip()


DCP_DIVIDES_TP: Final = Sentence("{context} does not divide spec.{role}.parallelism.tensor {tensor}")

PCP_DCP_SIZES: Final = Sentence(
    "{context} with spec.{role}.parallelism.prefillContext {prefill} and spec.{role}.parallelism.tensor {tensor}, but "
    "it must be 1, prefillContext or tensor x prefillContext"
)

PCP_NO_DATA: Final = Sentence(
    "{prefill} together with spec.{role}.parallelism.data {data}, and the engine takes only one of the two above 1"
)

INTERLEAVE_DIVIDES_BLOCK: Final = Sentence("{interleave} does not divide spec.{role}.blockSize {block}")

DATA_LOCAL_FITS_DATA: Final = Sentence("{local} does not divide spec.{role}.parallelism.data {data}")

DATA_LOCAL_ONE_POD: Final = Sentence(
    "{local} is below spec.{role}.parallelism.data {data}, and the operator makes one pod for an engine, so the other "
    "ranks would never come"
)

REPLICAS_OR_SCALING: Final = Sentence(
    "{replicas} is stated together with spec.{role}.scaling ({low} to {high}), and the replica count has exactly one "
    "owner; remove one of the two"
)

SCALING_BOUNDS: Final = Sentence("{low} is above spec.{role}.scaling.maxReplicas {high}")

ROLLOUT_NOT_STUCK: Final = Sentence(
    "0 together with spec.rolloutStrategy.maxSurge 0 lets no rollout move, because it may neither add an engine nor "
    "take one away"
)

MAX_SKEW_POSITIVE: Final = Sentence(
    "0% lets no rollout begin, because the first engine of a new revision has no partner yet"
)

RDMA_NEEDS_PROTOCOL: Final = Sentence(
    "is stated while spec.kvConnector.protocol is tcp, so the devices would be taken and never used"
)

CACHE_NEEDS_HUB: Final = Sentence(
    "is stated, but spec.model.uri is no hf:// URI, and only a model of a hub is pulled into a claim"
)

MULTINODE_RANKS: Final = Sentence(
    "{nodes} does not divide the ranks of an engine, spec.{role}.parallelism.tensor {tensor} x prefillContext "
    "{prefill} x pipeline {pipeline}"
)

MULTINODE_DATA: Final = Sentence(
    "{data} together with spec.{role}.multinode.nodeCount {nodes}: an engine on several nodes has no data parallelism. "
    "Raise replicas instead"
)

MLA_ONE_HEAD: Final = Sentence(
    "{kv} with spec.model.geometry.attention mla, which caches one compressed head for all attention heads"
)

KV_HEADS_DIVIDE: Final = Sentence("{kv} does not divide spec.model.geometry.attentionHeads {heads}")

DECODE_TOO_SHORT: Final = Sentence(
    "{decode} is below spec.prefill.maxModelLen {prefill}, and decode must take every prompt that prefill takes"
)

CONNECTOR_LARGEST: Final = Sentence("{value} with spec.kvConnector.type {type}, which takes at most {largest}")

CONNECTOR_WHOLE_GROUP: Final = Sentence(
    "{context} with spec.kvConnector.type {type}, which takes 1 or all of spec.{role}.parallelism.tensor {tensor}"
)

CONNECTOR_EQUAL: Final = Sentence(
    "{decode} differs from spec.prefill.{field} {prefill}, and spec.kvConnector.type {type} takes only equal values"
)

CONNECTOR_EQUAL_SHARDED: Final = Sentence(
    "{decode} differs from spec.prefill.{field} {prefill}, and spec.kvConnector.type {type} takes only equal values "
    "while a decodeContext is above 1 (now {prefill_context} on prefill and {decode_context} on decode)"
)

CONNECTOR_ATTENTION: Final = Sentence(
    "{context} with spec.kvConnector.type {type} and {model} {attention}, and this connector shards models with "
    "attention {able} only"
)

CONNECTOR_DIVIDE: Final = Sentence(
    "{decode} with spec.prefill.{field} {prefill}, and spec.kvConnector.type {type} takes only sizes of which one "
    "divides the other"
)

CONNECTOR_BLOCK_INTERLEAVE: Final = Sentence(
    "{interleave} differs from spec.{role}.blockSize {block}, and spec.kvConnector.type {type} moves whole blocks"
)

ROUTER_DISCOVERS: Final = Sentence(
    "{replicas} with spec.kvConnector.type {type}: the bundled router finds engines by their labels and then hands "
    "decode no transfer parameters, so decode would compute every prompt again. Set 0 and bring a router that asks "
    "the bootstrap servers, or choose another connector"
)
