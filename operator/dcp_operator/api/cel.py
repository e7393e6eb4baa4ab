"""CEL rules of the CRD: the static admission rules, in the words of `dcp_operator.rules`.

They bind where the admission webhook is down. An expression sees one object and no loop over a range, so divisors are
found as pairs (d, n/d) with d up to the square root of the largest n that the field allows.
"""

from dataclasses import dataclass
from math import isqrt
from typing import Any

from dcp_operator.api.spec import MAX_BLOCK_SIZE, MAX_PARALLEL_SIZE


@dataclass(frozen=True, slots=True)
class CelRule:
    """One entry of x-kubernetes-validations; `path` is relative to the spec, in the form of `fieldPath`."""

    rule: str
    path: str
    holds: str
    message: str
    message_expression: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the entry as the API server reads it. `message` is what a failing messageExpression falls back to."""
        entry: dict[str, Any] = {"rule": self.holds, "message": self.message, "fieldPath": self.path}
        if self.message_expression is not None:
            entry["messageExpression"] = self.message_expression
        return entry


def cel_rules() -> list[dict[str, Any]]:
    """Return the validations of `spec`, in the order in which the rule engine reports them."""
    rules = [rule for role in ("prefill", "decode") for rule in _role_rules(role)]
    return [rule.to_json() for rule in [*rules, _rollout_not_stuck()]]


def _role_rules(role: str) -> list[CelRule]:
    return [
        _dcp_divides_tp(role),
        _pcp_dcp_sizes(role),
        _interleave_divides_block(role),
        _replicas_or_scaling(role),
        _scaling_bounds(role),
    ]


def _dcp_divides_tp(role: str) -> CelRule:
    sizes = f"self.{role}.parallelism"
    tensor, context = f"{sizes}.tensor", f"{sizes}.decodeContext"
    geometry = "self.model.geometry"
    # The nearest values must also be right for the model's heads, where they are known (rule gqa-dcp-replicas).
    fits_heads = (
        f"(n == 1 || !has({geometry}) || {geometry}.attention == 'mla' || ({tensor} > {geometry}.kvHeads"
        f" && {tensor} % {geometry}.kvHeads == 0 && ({tensor} / {geometry}.kvHeads) % n == 0"
        f" && ({geometry}.attentionHeads / {geometry}.kvHeads) % n == 0))"
    )
    path = f"spec.{role}.parallelism.decodeContext"
    return CelRule(
        rule="dcp-divides-tp",
        path=f".{role}.parallelism.decodeContext",
        holds=f"{sizes}.prefillContext > 1 || {tensor} % {context} == 0",
        message=f"{path}: does not divide spec.{role}.parallelism.tensor [dcp-divides-tp]",
        message_expression=_with_nearest(
            f"{path}: %d does not divide spec.{role}.parallelism.tensor %d",
            "dcp-divides-tp",
            values=(context, tensor),
            nearest=_nearest(_divisors(tensor, MAX_PARALLEL_SIZE), context, fits_heads),
        ),
    )


def _pcp_dcp_sizes(role: str) -> CelRule:
    sizes = f"self.{role}.parallelism"
    path = f"spec.{role}.parallelism"
    tensor, context, prefill = f"{sizes}.tensor", f"{sizes}.decodeContext", f"{sizes}.prefillContext"
    rule = "it must be 1, prefillContext or tensor x prefillContext"
    return CelRule(
        rule="pcp-dcp-sizes",
        path=f".{role}.parallelism.decodeContext",
        holds=f"{prefill} == 1 || {context} in [1, {prefill}, {tensor} * {prefill}]",
        message=f"{path}.decodeContext: with {path}.prefillContext above 1 {rule} [pcp-dcp-sizes]",
        message_expression=_format(
            f"{path}.decodeContext: %d with {path}.prefillContext %d and {path}.tensor %d, but {rule}: 1, %d or %d"
            " [pcp-dcp-sizes]",
            (context, prefill, tensor, prefill, f"{tensor} * {prefill}"),
        ),
    )


def _interleave_divides_block(role: str) -> CelRule:
    block, interleave = f"self.{role}.blockSize", f"self.{role}.kvCacheInterleaveSize"
    path = f"spec.{role}.kvCacheInterleaveSize"
    return CelRule(
        rule="interleave-divides-block",
        path=f".{role}.kvCacheInterleaveSize",
        holds=f"!has({interleave}) || {block} % {interleave} == 0",
        message=f"{path}: does not divide spec.{role}.blockSize [interleave-divides-block]",
        message_expression=_with_nearest(
            f"{path}: %d does not divide spec.{role}.blockSize %d",
            "interleave-divides-block",
            values=(interleave, block),
            nearest=_nearest(_divisors(block, MAX_BLOCK_SIZE), interleave, "true"),
        ),
    )


def _replicas_or_scaling(role: str) -> CelRule:
    path = f"spec.{role}"
    why = "and the replica count has exactly one owner; remove one of the two [replicas-or-scaling]"
    return CelRule(
        rule="replicas-or-scaling",
        path=f".{role}.replicas",
        holds=f"!has(self.{role}.replicas) || !has(self.{role}.scaling)",
        message=f"{path}.replicas: is stated together with {path}.scaling, {why}",
        message_expression=_format(
            f"{path}.replicas: %d is stated together with {path}.scaling (%d to %d), {why}",
            (f"self.{role}.replicas", f"self.{role}.scaling.minReplicas", f"self.{role}.scaling.maxReplicas"),
        ),
    )


def _scaling_bounds(role: str) -> CelRule:
    scaling = f"self.{role}.scaling"
    path = f"spec.{role}.scaling"
    return CelRule(
        rule="scaling-bounds",
        path=f".{role}.scaling.minReplicas",
        holds=f"!has({scaling}) || {scaling}.minReplicas <= {scaling}.maxReplicas",
        message=f"{path}.minReplicas: is above {path}.maxReplicas [scaling-bounds]",
        message_expression=_format(
            f"{path}.minReplicas: %d is above {path}.maxReplicas %d; nearest that works: %d [scaling-bounds]",
            (f"{scaling}.minReplicas", f"{scaling}.maxReplicas", f"{scaling}.maxReplicas"),
        ),
    )


def _rollout_not_stuck() -> CelRule:
    strategy = "self.rolloutStrategy"

    def nothing(field: str) -> str:
        value = f"{strategy}.{field}"
        return f"(type({value}) == int ? {value} == 0 : {value} == '0%')"

    return CelRule(
        rule="rollout-not-stuck",
        path=".rolloutStrategy.maxUnavailable",
        holds=f"!({nothing('maxSurge')} && {nothing('maxUnavailable')})",
        message="spec.rolloutStrategy.maxUnavailable: 0 together with spec.rolloutStrategy.maxSurge 0 lets no rollout "
        "move, because it may neither add an engine nor take one away; nearest that works: 1, or maxSurge 1 "
        "[rollout-not-stuck]",
    )


def _format(text: str, values: tuple[str, ...]) -> str:
    """Return an expression for `text` with its %d filled in.

    `format` is the one way to put numbers into a message: the API server's cost estimate takes the text of a
    converted number, and so any sum of texts, to be without bound.
    """
    return f"'{text}'.format([{', '.join(values)}])"


def _with_nearest(text: str, rule: str, *, values: tuple[str, ...], nearest: str) -> str:
    """Return an expression for `text; nearest that work: A, B [rule]`, where `nearest` is a list of up to two."""
    endings = ("", "; nearest that works: %d", "; nearest that work: %d, %d")
    texts = ", ".join(f"'{text}{ending} [{rule}]'" for ending in endings)
    return f"[{texts}][size({nearest})].format([{', '.join(values)}] + {nearest})"


def _divisors(number: str, largest: int) -> str:
    """Return an expression for the list of all divisors of `number`, which is at most `largest`."""
    small = f"[{', '.join(map(str, range(1, isqrt(largest) + 1)))}].filter(d, {number} % d == 0)"
    return f"({small} + {small}.map(d, {number} / d))"


def _nearest(candidates: str, found: str, fits: str) -> str:
    """Return an expression for the closest candidate n below and above `found` that fits: a list of up to two.

    Candidates below are negated, so that `min` picks the closest on either side.
    """
    return (
        f"[{candidates}.filter(n, n < {found} && {fits}).map(n, -n), {candidates}.filter(n, n > {found} && {fits})]"
        ".filter(side, size(side) > 0).map(side, side.min() < 0 ? -side.min() : side.min())"
    )
