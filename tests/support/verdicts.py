"""What the rules, the engines and the connector each say of an object with two roles."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from dcp_connector.geometry import GeometryError, SideLayout
from dcp_connector.mapping import check_pair
from dcp_connector.tiling import TilingError, verify_tiling
from dcp_operator.api.load import load_spec
from dcp_operator.api.spec import Spec
from dcp_operator.build.engine_args import engine_args
from dcp_operator.flags import image_version
from dcp_operator.rules import check_body
from dcp_operator.settings import Role, resolve_role
from tests.support.vllm_process import vllm_process


@dataclass(frozen=True)
class Verdicts:
    """Three verdicts on one object; each is empty where the object is taken."""

    #: Ids of the rules that refuse it.
    rules: frozenset[str]
    messages: tuple[str, ...]
    #: For each role "stage: words" of the engine that doesn't start.
    engines: dict[str, str]
    #: Why the two sides can't exchange KV.
    connector: str
    #: For each role what its engine would run with, in the words of `EngineSettings`; only of engines that start.
    facts: dict[str, dict[str, str]]

    @property
    def refused_at_run_time(self) -> bool:
        return bool(self.engines or self.connector)


def verdicts(body: dict[str, Any]) -> Verdicts:
    """Ask all three."""
    report = check_body(body)
    spec = load_spec(body)
    assert spec is not None, report.violations
    geometry = body["spec"]["model"]["geometry"]
    cases = [{"geometry": geometry, "args": engine_args("chat", spec, role)} for role in Role]
    version = image_version(spec.image)
    assert version is not None
    answers = dict(zip(Role, vllm_process(version).ask("judge", cases=cases), strict=True))
    engines = {
        str(role): f"{answer['stage']}: {answer['error']}" for role, answer in answers.items() if "error" in answer
    }
    facts = {str(role): answer["facts"] for role, answer in answers.items() if "facts" in answer}
    return Verdicts(
        rules=frozenset(finding.rule for finding in report.violations),
        messages=tuple(str(finding) for finding in report.violations),
        engines=engines,
        connector=_connector(spec, geometry, version) or _formats(facts),
        facts=facts,
    )


def _connector(spec: Spec, geometry: dict[str, Any], version: str) -> str:
    """Return why the connector that the object names refuses the pair."""
    if spec.kv_connector.type == "mooncake":
        return transfer_problem(spec, geometry)
    case: dict[str, Any] = {"connector": spec.kv_connector.type, "geometry": geometry}
    for role in Role:
        sizes = resolve_role(spec, role)
        case[role] = {
            "tensor": sizes.tensor,
            "decode_context": sizes.decode_context,
            "block_size": sizes.block_size,
        }
    return vllm_process(version).ask("meet", cases=[case])[0] or ""


def transfer_problem(spec: Spec, geometry: dict[str, Any]) -> str:
    """Return why the bundled connector's mapping can't serve a pair; empty if it proves that it can."""
    heads = 1 if geometry["attention"] == "mla" else geometry["kvHeads"]
    try:
        prefill, decode = (_side(spec, role, heads) for role in Role)
        _prove(prefill, decode)
    except (GeometryError, TilingError) as error:
        return str(error)
    return ""


def _side(spec: Spec, role: Role, heads: int) -> SideLayout:
    sizes = resolve_role(spec, role)
    return SideLayout(
        tensor_parallel_size=sizes.tensor,
        dcp_size=sizes.decode_context,
        interleave=sizes.interleave,
        block_size=sizes.block_size,
        num_kv_heads=heads,
    )


@cache
def _prove(prefill: SideLayout, decode: SideLayout) -> None:
    """Prove the mapping for the first, the last and a middle decode rank; over some blocks where the period is long."""
    check_pair(prefill, decode)
    last = decode.tensor_parallel_size - 1
    for rank in sorted({0, last // 2, last}):
        verify_tiling(prefill, decode, rank, token_range=(decode.virtual_block_size, decode.virtual_block_size * 3 + 5))


def _formats(facts: dict[str, dict[str, str]]) -> str:
    """Compare what both sides' handshakes would hold: the type of the cached numbers."""
    if len(facts) < len(Role):
        return ""
    prefill, decode = ({name: each[name] for name in ("dtype", "kv_cache_dtype")} for each in facts.values())
    return "" if prefill == decode else f"formats: prefill has {prefill}, decode has {decode}"
