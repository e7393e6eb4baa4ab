"""ConfigCompatible: whether the rules found that the two sides fit, and what running engines have proved themselves."""

from collections.abc import Iterable

from dcp_operator.api.findings import Finding
from dcp_operator.api.spec import Spec
from dcp_operator.connectors import PROFILES
from dcp_operator.reasons import Reason, Said
from dcp_operator.settings import Role, resolve_role
from dcp_operator.target import Target

#: Rule whose warning says that the model's shape is not known, so that the rules about it were not asked.
UNKNOWN_MODEL_RULE = "unknown-model"


def config_compatible(target: Target, *, engines_run: bool) -> Said:
    """Return what ConfigCompatible says; `engines_run` is whether all engines of the target's revision are ready."""
    if target.violations:
        return Said("False", Reason.INVALID_SPEC, f"the spec is refused: {_lines(target.violations)}")
    unknown = [finding for finding in target.warnings if finding.rule == UNKNOWN_MODEL_RULE]
    if unknown and not (engines_run and target.spec is not None and start_proves_heads(target.spec)):
        return Said("Unknown", Reason.MODEL_UNKNOWN, _lines(unknown))
    if unknown:
        said = "the catalogue does not know the model, but engines of both roles run with these sizes, and they "
        return Said("True", Reason.RULES_PASSED, f"{said}are checked against the model's heads at the start")
    advice = f"; advice: {_lines(target.warnings)}" if target.warnings else ""
    return Said("True", Reason.RULES_PASSED, f"prefill and decode fit together{advice}")


def start_proves_heads(spec: Spec) -> bool:
    """Whether engines that run have shown that their sizes suit the model's heads, whatever these are.

    The bundled connector reads the heads from the engine and holds its sizes to the whole rule before it starts
    (`dcp_connector.geometry`). With another one it is up to vLLM. It refuses at its start what the rules about
    heads refuse, but for one case: T tensor ranks of which T / H share a KV head, and a decode context W up to T / H
    that doesn't divide it. With W 1, with W = T (then H is 1), and with T a power of two (then T / H and W are too, and
    the smaller divides the larger) there is no such case.
    """
    if PROFILES[spec.kv_connector.type].bundled:
        return True
    sizes = [resolve_role(spec, role) for role in Role]
    return all(
        each.prefill_context == 1 and (each.decode_context in (1, each.tensor) or each.tensor & (each.tensor - 1) == 0)
        for each in sizes
    )


def _lines(findings: Iterable[Finding]) -> str:
    return "; ".join(map(str, findings))
