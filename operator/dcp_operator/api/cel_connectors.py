"""CEL rules on the pair of prefill and decode: what the table of connectors says, as far as one expression can tell."""

from collections.abc import Iterable

from dcp_operator.api import sentences
from dcp_operator.api.cel_expressions import CelRule, value_of
from dcp_operator.api.spec import ATTENTION_KINDS
from dcp_operator.connectors import Profile

_ROLES = ("prefill", "decode")


def profile_rules(profile: Profile) -> Iterable[CelRule]:
    """Yield what the table of connectors says about one of them, as far as one expression can tell."""
    takes = profile.takes
    other = f"self.kvConnector.type != '{profile.name}'"
    reads = ("kvConnector.type",)
    for role in _ROLES:
        words: dict[str, object] = {"role": role, "type": profile.name}
        for name, largest in takes.largest.items():
            path = f"{role}.parallelism.{name}"
            yield CelRule(
                rule="connector-takes-pair",
                path=path,
                holds=f"{other} || self.{path} <= {largest}",
                sentence=sentences.CONNECTOR_LARGEST,
                values={"value": path},
                words=words | {"largest": largest},
                reads=reads,
            )
        if takes.whole_tensor_group:
            context, tensor = f"{role}.parallelism.decodeContext", f"{role}.parallelism.tensor"
            yield CelRule(
                rule="connector-takes-pair",
                path=context,
                holds=f"{other} || self.{context} == 1 || self.{context} == self.{tensor}",
                sentence=sentences.CONNECTOR_WHOLE_GROUP,
                values={"context": context, "tensor": tensor},
                words=words,
                reads=reads,
            )
        if takes.interleave_is_block:
            yield _block_interleave(profile, role)
        yield from _sharded_attention(profile, role)
    yield from _equal_when_sharded(profile)
    for name in takes.equal:
        prefill, decode = f"prefill.{name}", f"decode.{name}"
        yield CelRule(
            rule="connector-takes-pair",
            path=decode,
            holds=f"{other} || self.{prefill} == self.{decode}",
            sentence=sentences.CONNECTOR_EQUAL,
            values={"decode": decode, "prefill": prefill},
            words={"field": name, "type": profile.name},
            reads=reads,
        )
    for name in takes.divide:
        prefill, decode = f"prefill.parallelism.{name}", f"decode.parallelism.{name}"
        yield CelRule(
            rule="connector-takes-pair",
            path=decode,
            holds=f"{other} || self.{prefill} % self.{decode} == 0 || self.{decode} % self.{prefill} == 0",
            sentence=sentences.CONNECTOR_DIVIDE,
            values={"decode": decode, "prefill": prefill},
            words={"field": f"parallelism.{name}", "type": profile.name},
            reads=reads,
        )
    if not profile.router_discovers:
        yield CelRule(
            rule="router-drives-connector",
            path="router.replicas",
            holds=f"{other} || self.router.replicas == 0",
            sentence=sentences.ROUTER_DISCOVERS,
            values={"replicas": "router.replicas"},
            words={"type": profile.name},
            reads=reads,
        )


def _block_interleave(profile: Profile, role: str) -> CelRule:
    interleave, block = f"{role}.kvCacheInterleaveSize", f"{role}.blockSize"
    context = f"{role}.parallelism.decodeContext"
    return CelRule(
        rule="connector-takes-pair",
        path=interleave,
        holds=f"self.kvConnector.type != '{profile.name}' || self.{context} == 1 || !has(self.{interleave})"
        f" || self.{interleave} == self.{block}",
        sentence=sentences.CONNECTOR_BLOCK_INTERLEAVE,
        values={"interleave": interleave, "block": block},
        words={"role": role, "type": profile.name},
        reads=("kvConnector.type", context),
    )


def _sharded_attention(profile: Profile, role: str) -> Iterable[CelRule]:
    """Yield a rule for each attention kind that the connector doesn't shard."""
    able = profile.takes.sharded_attention
    context, geometry = f"{role}.parallelism.decodeContext", "model.geometry"
    for attention in ATTENTION_KINDS if able is not None else ():
        if able is not None and attention not in able:
            yield CelRule(
                rule="connector-takes-pair",
                path=context,
                holds=f"self.kvConnector.type != '{profile.name}' || self.{context} == 1 || !has(self.{geometry})"
                f" || self.{geometry}.attention != '{attention}'",
                sentence=sentences.CONNECTOR_ATTENTION,
                values={"context": context},
                words={
                    "type": profile.name,
                    "model": f"spec.{geometry}.attention",
                    "attention": attention,
                    "able": " or ".join(able),
                },
                reads=("kvConnector.type", f"{geometry}.attention"),
            )


def _equal_when_sharded(profile: Profile) -> Iterable[CelRule]:
    contexts = {f"{role}_context": f"{role}.parallelism.decodeContext" for role in _ROLES}
    unsharded = " && ".join(f"self.{path} == 1" for path in contexts.values())
    for name in profile.takes.equal_when_sharded:
        field = name if name == "kvCacheInterleaveSize" else f"parallelism.{name}"
        prefill, decode = (_with_default(role, field) for role in _ROLES)
        yield CelRule(
            rule="connector-takes-pair",
            path=f"decode.{field}",
            holds=f"self.kvConnector.type != '{profile.name}' || ({unsharded})"
            f" || {value_of(prefill)} == {value_of(decode)}",
            sentence=sentences.CONNECTOR_EQUAL_SHARDED,
            values={"decode": decode, "prefill": prefill, **contexts},
            words={"field": field, "type": profile.name},
            reads=("kvConnector.type", *(f"{role}.{each}" for role in _ROLES for each in _behind(field))),
        )


def _behind(field: str) -> tuple[str, ...]:
    """Return the fields that a role's value comes from."""
    return (field, "blockSize") if field == "kvCacheInterleaveSize" else (field,)


def _with_default(role: str, field: str) -> str:
    """Return the path of a role's field, or an expression for it with what stands for it where it is absent."""
    if field != "kvCacheInterleaveSize":
        return f"{role}.{field}"
    return f"(has(self.{role}.{field}) ? self.{role}.{field} : self.{role}.blockSize)"
