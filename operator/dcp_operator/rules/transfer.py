"""Rules on the pair of prefill and decode: what the chosen connector can transfer between.

What a connector takes is data (`dcp_operator.connectors`); here is what each kind of limit means.
"""

from collections.abc import Iterator

from dcp_operator.api import sentences
from dcp_operator.connectors import PROFILES
from dcp_operator.rules.context import Context, Problem, RoleContext, Rule
from dcp_operator.rules.edits import REMOVED, Fix
from dcp_operator.rules.geometry import divisors, kv_heads, tensor_fits_heads

_TYPE = "spec.kvConnector.type"
#: The connector to fall back on: it takes pairs that no other does.
_BUNDLED = "mooncake"


def connector_takes_pair(context: Context) -> Iterator[Problem]:
    """The chosen connector can transfer between these two engines.

    mooncake, the bundled one, takes every pair of tensor, decodeContext, interleave, block and pipeline sizes that the
    engines themselves accept, for models with one kind of cache. mooncake-upstream doesn't know decode context
    parallelism and writes wrong KV without an error unless both sides are alike; nixl shards models with latent
    attention only, over all tensor ranks. What a connector doesn't take fails at start-up or at the first transfer, or
    answers nonsense.

    Change the sizes to what the message names, or choose another spec.kvConnector.type.
    """
    yield from takes_pair(context)


def takes_pair(context: Context) -> Iterator[Problem]:
    """Yield what the connector's table of limits says against the pair."""
    for role in context.roles:
        yield from _within_largest(context, role)
        yield from _own_sizes(context, role)
    yield from _equal(context)
    yield from _divide(context)
    yield from _model(context)


def _within_largest(context: Context, role: RoleContext) -> Iterator[Problem]:
    for field, largest in context.profile.takes.largest.items():
        value = _value(role, f"parallelism.{field}")
        if value > largest:
            path = f"{role.path}.parallelism.{field}"
            yield Problem(
                path,
                sentences.CONNECTOR_LARGEST.say(value=value, type=context.profile.name, largest=largest),
                fixes=tuple(Fix(path, size) for size in range(1, largest + 1)),
            )


def _own_sizes(context: Context, role: RoleContext) -> Iterator[Problem]:
    """Check what the connector asks of a role whose cache is sharded."""
    takes, sizes = context.profile.takes, role.settings
    path = f"{role.path}.parallelism.decodeContext"
    if takes.whole_tensor_group and sizes.decode_context not in (1, sizes.tensor):
        yield Problem(
            path,
            sentences.CONNECTOR_WHOLE_GROUP.say(
                role=role.role, context=sizes.decode_context, type=context.profile.name, tensor=sizes.tensor
            ),
            fixes=(Fix(path, 1), Fix(path, sizes.tensor), Fix(_TYPE, _BUNDLED)),
        )
    if sizes.decode_context == 1:
        return
    if takes.interleave_is_block and sizes.interleave != sizes.block_size:
        interleave = f"{role.path}.kvCacheInterleaveSize"
        yield Problem(
            interleave,
            sentences.CONNECTOR_BLOCK_INTERLEAVE.say(
                role=role.role, interleave=sizes.interleave, block=sizes.block_size, type=context.profile.name
            ),
            fixes=(Fix(interleave, sizes.block_size), Fix(interleave, REMOVED)),
        )
    geometry = context.geometry
    if takes.sharded_attention is not None and geometry and geometry.attention not in takes.sharded_attention:
        yield Problem(
            path,
            sentences.CONNECTOR_ATTENTION.say(
                context=sizes.decode_context,
                type=context.profile.name,
                model=context.model_path("attention"),
                attention=geometry.attention,
                able=" or ".join(takes.sharded_attention),
            ),
            fixes=(Fix(path, 1), Fix(_TYPE, _BUNDLED)),
        )


def _equal(context: Context) -> Iterator[Problem]:
    takes = context.profile.takes
    is_sharded = any(role.settings.decode_context > 1 for role in context.roles)
    for field in (*takes.equal, *(map(_below, takes.equal_when_sharded) if is_sharded else ())):
        prefill, decode = (_value(role, field) for role in context.roles)
        if prefill == decode:
            continue
        here, there = f"spec.decode.{field}", f"spec.prefill.{field}"
        if field in takes.equal:
            message = sentences.CONNECTOR_EQUAL.say(
                field=field, decode=decode, prefill=prefill, type=context.profile.name
            )
        else:
            message = sentences.CONNECTOR_EQUAL_SHARDED.say(
                field=field,
                decode=decode,
                prefill=prefill,
                type=context.profile.name,
                prefill_context=context.prefill.settings.decode_context,
                decode_context=context.decode.settings.decode_context,
            )
        fixes = [Fix(here, prefill), Fix(there, decode), Fix(_TYPE, _BUNDLED)]
        if field not in takes.equal:
            fixes += [Fix(f"{role.path}.parallelism.decodeContext", 1) for role in context.roles]
        yield Problem(here, message, fixes=tuple(fixes))


def _divide(context: Context) -> Iterator[Problem]:
    for field in map(_below, context.profile.takes.divide):
        prefill, decode = (_value(role, field) for role in context.roles)
        if prefill % decode and decode % prefill:
            here, there = f"spec.decode.{field}", f"spec.prefill.{field}"
            yield Problem(
                here,
                sentences.CONNECTOR_DIVIDE.say(field=field, decode=decode, prefill=prefill, type=context.profile.name),
                fixes=(
                    *(Fix(here, size) for size in (*divisors(prefill), prefill * 2)),
                    *(Fix(there, size) for size in (*divisors(decode), decode * 2)),
                    Fix(_TYPE, _BUNDLED),
                ),
            )


def _model(context: Context) -> Iterator[Problem]:
    """Check what depends on the model beside the sizes."""
    takes, facts = context.profile.takes, context.facts
    if facts is None:
        return
    prefill, decode = (role.settings for role in context.roles)
    if takes.layouts is not None and facts.layout not in takes.layouts and not _one_kind_of_cache(context):
        able = [profile.name for profile in PROFILES.values() if profile.takes.layouts is None]
        yield Problem(
            _TYPE,
            f"{context.profile.name} with {context.model_path('layout')} {facts.layout}, and this connector takes "
            "models with one kind of cache for all layers",
            fixes=tuple(Fix(_TYPE, name) for name in able),
        )
    geometry, heads = facts.geometry, kv_heads(facts.geometry)
    is_replicated = geometry.attention == "gqa" and prefill.tensor > heads
    if not takes.replicated_prefill and is_replicated and prefill.tensor > decode.tensor:
        here, there = "spec.prefill.parallelism.tensor", "spec.decode.parallelism.tensor"
        choices = [size for size in divisors(geometry.attention_heads) if tensor_fits_heads(size, geometry)]
        yield Problem(
            here,
            f"{prefill.tensor} is above {there} {decode.tensor} and above {context.model_path('kvHeads')} {heads}, and "
            f"{_TYPE} {context.profile.name} takes one of the two only",
            fixes=(
                *(Fix(path, size) for path in (here, there) for size in choices),
                Fix(_TYPE, _BUNDLED),
            ),
        )


def router_drives_connector(context: Context) -> Iterator[Problem]:
    """The bundled router can work with the chosen connector.

    The router discovers engines by their labels. With mooncake-upstream it would have to ask each prefill engine's
    bootstrap server, which it does for engines given as addresses only: decode gets no transfer parameters and
    computes every prompt again, while everything looks well.

    Set spec.router.replicas to 0 and bring a router that asks the bootstrap servers, such as llm-d's, which finds the
    pods by the label llm-d.ai/role; or choose another connector.
    """
    replicas, profile = context.spec.router.replicas, context.profile
    if replicas > 0 and not profile.router_discovers:
        path = "spec.router.replicas"
        yield Problem(
            path,
            sentences.ROUTER_DISCOVERS.say(replicas=replicas, type=profile.name),
            fixes=(Fix(path, 0), Fix(_TYPE, _BUNDLED)),
        )


def _one_kind_of_cache(context: Context) -> bool:
    """Whether both engines keep windows as whole as everything else; the states of linear layers stay another kind."""
    flags = [role.arguments.last("--disable-hybrid-kv-cache-manager") for role in context.roles]
    is_off = all(flag is not None and not flag.negated for flag in flags)
    return is_off and context.facts is not None and context.facts.layout in ("sliding", "chunked")


def _below(field: str) -> str:
    """Return a field's path below its role."""
    return field if field in ("blockSize", "kvCacheInterleaveSize") else f"parallelism.{field}"


def _value(role: RoleContext, field: str) -> int:
    """Return a size of a role after defaults, by its field below the role."""
    sizes = role.settings
    return {
        "blockSize": sizes.block_size,
        "kvCacheInterleaveSize": sizes.interleave,
        "parallelism.tensor": sizes.tensor,
        "parallelism.pipeline": sizes.pipeline,
        "parallelism.data": sizes.data,
        "parallelism.decodeContext": sizes.decode_context,
        "parallelism.prefillContext": sizes.prefill_context,
    }[field]


RULES = (
    Rule(
        "connector-takes-pair",
        connector_takes_pair,
        sources=(
            "vllm #36948",
            "vllm #42895",
            "vllm #43523",
            "vllm #52516",
            "llm-d #2433",
            "TensorRT-LLM #6507",
            "vLLM config/vllm.py and kv_connector/v1/nixl/base_worker.py",
        ),
        needs_model=True,
    ),
    Rule("router-drives-connector", router_drives_connector, sources=("llm-d-router #1220", "kserve #5987")),
)
