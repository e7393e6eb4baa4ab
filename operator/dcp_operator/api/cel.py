"""CEL rules of the CRD: the static admission rules, in the words of `dcp_operator.api.sentences`.

They bind where the admission webhook is down.

A rule holds for an update that leaves alone every field that it reads, so that an object from before the rule can be
edited elsewhere; the rule engine does the same (ADR 0008).
"""

from typing import Any

from dcp_operator.api import sentences
from dcp_operator.api.cel_connectors import profile_rules
from dcp_operator.api.cel_expressions import CelRule, Ending, divisors, nearest_two
from dcp_operator.api.spec import MAX_BLOCK_SIZE, MAX_PARALLEL_SIZE
from dcp_operator.connectors import PROFILES

_ROLES = ("prefill", "decode")


def cel_rules() -> list[dict[str, Any]]:
    """Return the validations of `spec`, in the order in which the rule engine reports them."""
    rules = [_cache_needs_hub(), *_geometry()]
    rules += [*(rule for role in _ROLES for rule in _role_rules(role)), _decode_length()]
    for profile in PROFILES.values():
        rules += profile_rules(profile)
    return [rule.to_json() for rule in [*rules, _rollout_not_stuck(), _max_skew_positive(), _rdma_needs_protocol()]]


def _role_rules(role: str) -> list[CelRule]:
    return [
        _dcp_divides_tp(role),
        *_pcp_dcp_sizes(role),
        _interleave_divides_block(role),
        *_data_local(role),
        *_multinode(role),
        _replicas_or_scaling(role),
        _scaling_bounds(role),
    ]


def _geometry() -> list[CelRule]:
    geometry = "model.geometry"
    has, attention = f"!has(self.{geometry})", f"self.{geometry}.attention"
    kv, heads = f"{geometry}.kvHeads", f"{geometry}.attentionHeads"
    return [
        CelRule(
            rule="geometry-consistent",
            path=kv,
            holds=f"{has} || {attention} != 'mla' || self.{kv} == 1",
            sentence=sentences.MLA_ONE_HEAD,
            values={"kv": kv},
            remedy="; nearest that works: 1",
            reads=(f"{geometry}.attention",),
        ),
        CelRule(
            rule="geometry-consistent",
            path=kv,
            holds=f"{has} || {attention} == 'mla' || self.{heads} % self.{kv} == 0",
            sentence=sentences.KV_HEADS_DIVIDE,
            values={"kv": kv, "heads": heads},
            reads=(f"{geometry}.attention",),
        ),
    ]


def _dcp_divides_tp(role: str) -> CelRule:
    sizes = f"{role}.parallelism"
    tensor, context, geometry = f"self.{sizes}.tensor", f"self.{sizes}.decodeContext", "self.model.geometry"
    # The nearest values must suit the whole object as far as an expression can tell: heads, layers, connector.
    group = f"({tensor} / {geometry}.kvHeads)"
    fits = (
        f"(n == 1 || ((!has({geometry}.layout) || {geometry}.layout in ['full', 'sparse']) &&"
        f" ({geometry}.attention == 'mla' || ({tensor} > {geometry}.kvHeads && {tensor} % {geometry}.kvHeads == 0"
        f" && {group} % n == 0 && ({geometry}.attentionHeads / {geometry}.kvHeads) % n == 0))"
        f" && self.kvConnector.type == 'mooncake'))"
    )
    found = nearest_two(divisors(tensor, MAX_PARALLEL_SIZE), context, fits)
    return CelRule(
        rule="dcp-divides-tp",
        path=f"{sizes}.decodeContext",
        holds=f"self.{sizes}.prefillContext > 1 || {tensor} % {context} == 0",
        sentence=sentences.DCP_DIVIDES_TP,
        values={"context": f"{sizes}.decodeContext", "tensor": f"{sizes}.tensor"},
        words={"role": role},
        # Without stated heads only the webhook knows what the model allows.
        nearest=f"(has({geometry}) ? {found} : [])",
        reads=(f"{sizes}.prefillContext",),
    )


def _pcp_dcp_sizes(role: str) -> list[CelRule]:
    sizes = f"{role}.parallelism"
    tensor, context, prefill = (f"self.{sizes}.{name}" for name in ("tensor", "decodeContext", "prefillContext"))
    return [
        CelRule(
            rule="pcp-dcp-sizes",
            path=f"{sizes}.decodeContext",
            holds=f"{prefill} == 1 || {context} in [1, {prefill}, {tensor} * {prefill}]",
            sentence=sentences.PCP_DCP_SIZES,
            values={
                "context": f"{sizes}.decodeContext",
                "prefill": f"{sizes}.prefillContext",
                "tensor": f"{sizes}.tensor",
            },
            words={"role": role},
        ),
        CelRule(
            rule="pcp-dcp-sizes",
            path=f"{sizes}.prefillContext",
            holds=f"{prefill} == 1 || self.{sizes}.data == 1",
            sentence=sentences.PCP_NO_DATA,
            values={"prefill": f"{sizes}.prefillContext", "data": f"{sizes}.data"},
            words={"role": role},
        ),
    ]


def _interleave_divides_block(role: str) -> CelRule:
    block, interleave = f"self.{role}.blockSize", f"self.{role}.kvCacheInterleaveSize"
    return CelRule(
        rule="interleave-divides-block",
        path=f"{role}.kvCacheInterleaveSize",
        holds=f"!has({interleave}) || {block} % {interleave} == 0",
        sentence=sentences.INTERLEAVE_DIVIDES_BLOCK,
        values={"interleave": f"{role}.kvCacheInterleaveSize", "block": f"{role}.blockSize"},
        words={"role": role},
        nearest=f"(self.kvConnector.type == 'mooncake' ? {nearest_two(divisors(block, MAX_BLOCK_SIZE), interleave)}"
        f" : [])",
    )


def _data_local(role: str) -> list[CelRule]:
    data, local = f"self.{role}.parallelism.data", f"self.{role}.parallelism.dataLocal"
    return [
        CelRule(
            rule="data-local-fits-data",
            path=f"{role}.parallelism.dataLocal",
            holds=f"!has({local}) || {holds}",
            sentence=sentence,
            values={"local": f"{role}.parallelism.dataLocal", "data": f"{role}.parallelism.data"},
            words={"role": role},
            # A template may state accelerators for the ranks of a pod.
            endings=(Ending(f"!has(self.{role}.template)", text, values),),
        )
        for holds, sentence, text, values in (
            (
                f"{data} % {local} == 0",
                sentences.DATA_LOCAL_FITS_DATA,
                "; nearest that works: %d",
                (f"{role}.parallelism.data",),
            ),
            (
                f"{data} % {local} != 0 || {local} >= {data}",
                sentences.DATA_LOCAL_ONE_POD,
                f"; nearest that work: %d here, or %d in spec.{role}.parallelism.data",
                (f"{role}.parallelism.data", f"{role}.parallelism.dataLocal"),
            ),
        )
    ]


def _multinode(role: str) -> list[CelRule]:
    sizes, nodes = f"{role}.parallelism", f"{role}.multinode.nodeCount"
    none = f"!has(self.{role}.multinode)"
    factors = {"tensor": f"{sizes}.tensor", "prefill": f"{sizes}.prefillContext", "pipeline": f"{sizes}.pipeline"}
    ranks = " * ".join(f"self.{path}" for path in factors.values())
    return [
        CelRule(
            rule="multinode-ranks",
            path=nodes,
            holds=f"{none} || ({ranks}) % self.{nodes} == 0",
            sentence=sentences.MULTINODE_RANKS,
            values={"nodes": nodes, **factors},
            words={"role": role},
        ),
        CelRule(
            rule="multinode-data",
            path=f"{sizes}.data",
            holds=f"{none} || self.{sizes}.data == 1",
            sentence=sentences.MULTINODE_DATA,
            values={"data": f"{sizes}.data", "nodes": nodes},
            words={"role": role},
        ),
    ]


def _replicas_or_scaling(role: str) -> CelRule:
    return CelRule(
        rule="replicas-or-scaling",
        path=f"{role}.replicas",
        holds=f"!has(self.{role}.replicas) || !has(self.{role}.scaling)",
        sentence=sentences.REPLICAS_OR_SCALING,
        values={
            "replicas": f"{role}.replicas",
            "low": f"{role}.scaling.minReplicas",
            "high": f"{role}.scaling.maxReplicas",
        },
        words={"role": role},
    )


def _scaling_bounds(role: str) -> CelRule:
    scaling = f"{role}.scaling"
    return CelRule(
        rule="scaling-bounds",
        path=f"{scaling}.minReplicas",
        holds=f"!has(self.{scaling}) || self.{scaling}.minReplicas <= self.{scaling}.maxReplicas",
        sentence=sentences.SCALING_BOUNDS,
        values={"low": f"{scaling}.minReplicas", "high": f"{scaling}.maxReplicas"},
        words={"role": role},
        endings=(
            Ending(
                "!has(self.ratio)",
                f"; nearest that work: %d here, or %d in spec.{scaling}.maxReplicas",
                (f"{scaling}.maxReplicas", f"{scaling}.minReplicas"),
            ),
        ),
    )


def _decode_length() -> CelRule:
    prefill, decode, limit = "prefill.maxModelLen", "decode.maxModelLen", "model.geometry.maxModelLen"
    return CelRule(
        rule="max-model-len",
        path=decode,
        holds=f"!has(self.{prefill}) || !has(self.{decode}) || self.{prefill} <= self.{decode}",
        sentence=sentences.DECODE_TOO_SHORT,
        values={"decode": decode, "prefill": prefill},
        endings=(
            # Without the model's own limit only the webhook may know it, from the catalogue.
            Ending(
                f"has(self.model.geometry) && has(self.{limit}) && self.{prefill} <= self.{limit}",
                f"; nearest that work: %d here, or %d in spec.{prefill}",
                (prefill, decode),
            ),
        ),
    )


def _cache_needs_hub() -> CelRule:
    return CelRule(
        rule="model-cache",
        path="model.cache",
        holds="!has(self.model.cache) || self.model.uri.startsWith('hf://')",
        sentence=sentences.CACHE_NEEDS_HUB,
        reads=("model.cache", "model.uri"),
    )


def _max_skew_positive() -> CelRule:
    path = "rolloutStrategy.maxSkew"
    value = f"self.{path}"
    return CelRule(
        rule="max-skew-positive",
        path=path,
        holds=f"!has({value}) || type({value}) == int || {value} != '0%'",
        sentence=sentences.MAX_SKEW_POSITIVE,
        remedy="; nearest that works: 1",
        reads=(path,),
    )


def _rdma_needs_protocol() -> CelRule:
    return CelRule(
        rule="rdma-devices",
        path="kvConnector.rdma",
        holds="!has(self.kvConnector.rdma) || self.kvConnector.protocol == 'rdma'",
        sentence=sentences.RDMA_NEEDS_PROTOCOL,
        reads=("kvConnector.rdma", "kvConnector.protocol"),
    )


def _rollout_not_stuck() -> CelRule:
    strategy = "rolloutStrategy"

    def nothing(name: str) -> str:
        value = f"self.{strategy}.{name}"
        return f"(type({value}) == int ? {value} == 0 : {value} == '0%')"

    return CelRule(
        rule="rollout-not-stuck",
        path=f"{strategy}.maxUnavailable",
        holds=f"!({nothing('maxSurge')} && {nothing('maxUnavailable')})",
        sentence=sentences.ROLLOUT_NOT_STUCK,
        remedy="; nearest that work: 1 here, or 1 in spec.rolloutStrategy.maxSurge",
        reads=(f"{strategy}.maxSurge", f"{strategy}.maxUnavailable"),
    )
