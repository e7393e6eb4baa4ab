"""Rules on one role's sizes: what the engine needs to start and to compute rightly."""

from collections.abc import Iterator

from dcp_operator.api.findings import Severity
from dcp_operator.api.spec import MAX_PARALLEL_SIZE, Geometry
from dcp_operator.rules.context import Context, Problem, RoleContext, Rule
from dcp_operator.rules.geometry import (
    context_choices,
    context_fits_heads,
    context_fits_tensor,
    divisors,
    kv_heads,
    tensor_fits_heads,
)
from dcp_operator.rules.nearest import nearest, words


def dcp_divides_tp(context: Context) -> Iterator[Problem]:
    """decodeContext divides tensor.

    Decode context parallelism shards one sequence over consecutive tensor ranks, so the tensor ranks must fall into
    groups of decodeContext. The engine ends at start-up otherwise. With prefillContext above 1 the rule pcp-dcp-sizes
    applies instead.

    Set decodeContext to a divisor of tensor; the message names the nearest.
    """
    for role in context.roles:
        sizes = role.settings
        if sizes.prefill_context == 1 and not context_fits_tensor(sizes.decode_context, sizes.tensor):
            near = nearest(sizes.decode_context, context_choices(sizes.tensor, context.geometry), lambda _: True)
            yield Problem(
                f"{role.path}.parallelism.decodeContext",
                f"{sizes.decode_context} does not divide {role.path}.parallelism.tensor {sizes.tensor}{words(near)}",
            )


def pcp_dcp_sizes(context: Context) -> Iterator[Problem]:
    """With prefillContext above 1, decodeContext is 1, prefillContext or tensor x prefillContext.

    The engine's decode groups then span the prefill-context axis or all ranks, nothing in between, and it takes no data
    parallelism beside prefill context parallelism. It ends at start-up otherwise.

    Choose one of the sizes that the message names, or set prefillContext to 1.
    """
    for role in context.roles:
        sizes = role.settings
        path = f"{role.path}.parallelism"
        if sizes.prefill_context == 1:
            continue
        allowed = (1, sizes.prefill_context, sizes.tensor * sizes.prefill_context)
        if sizes.decode_context not in allowed:
            yield Problem(
                f"{path}.decodeContext",
                f"{sizes.decode_context} with {path}.prefillContext {sizes.prefill_context} and {path}.tensor "
                f"{sizes.tensor}, but it must be 1, prefillContext or tensor x prefillContext: "
                f"1, {allowed[1]} or {allowed[2]}",
            )
        if sizes.data > 1:
            yield Problem(
                f"{path}.prefillContext",
                f"{sizes.prefill_context} together with {path}.data {sizes.data}, and the engine takes only one of the "
                "two above 1; set one of them to 1",
            )


def geometry_consistent(context: Context) -> Iterator[Problem]:
    """The model's geometry agrees with itself.

    Multi-head latent attention (mla) caches one compressed head, so kvHeads is 1, whatever num_key_value_heads in
    config.json says. Otherwise every KV head serves equally many attention heads, so kvHeads divides attentionHeads.
    The other rules reckon with these numbers.

    Correct spec.model.geometry; leave it out if you don't know it, and the rules that need it are skipped with a
    warning.
    """
    geometry = context.geometry
    if geometry is None:
        return
    path = "spec.model.geometry"
    if geometry.attention == "mla" and geometry.kv_heads != 1:
        yield Problem(
            f"{path}.kvHeads",
            f"{geometry.kv_heads} with {path}.attention mla, which caches one compressed head for all attention heads; "
            "nearest that works: 1",
        )
    elif geometry.attention_heads % geometry.kv_heads:
        near = nearest(geometry.kv_heads, divisors(geometry.attention_heads), lambda _: True)
        yield Problem(
            f"{path}.kvHeads",
            f"{geometry.kv_heads} does not divide {path}.attentionHeads {geometry.attention_heads}{words(near)}",
        )


def heads_divide_tp(context: Context) -> Iterator[Problem]:
    """tensor divides the attention heads, and one of tensor and the KV heads divides the other.

    Tensor parallelism gives every rank whole heads: equally many attention heads, and either equally many KV heads or
    one KV head that equally many ranks share. The engine ends at start-up otherwise.

    Set tensor to a value that the message names.
    """
    if (geometry := context.geometry) is None:
        return
    for role in context.roles:
        tensor = role.settings.tensor
        if tensor_fits_heads(tensor, geometry):
            continue
        heads = kv_heads(geometry)
        if geometry.attention_heads % tensor:
            found = f"{tensor} does not divide spec.model.geometry.attentionHeads {geometry.attention_heads}"
        elif tensor > heads:
            found = f"{tensor} is no multiple of spec.model.geometry.kvHeads {heads}"
        else:
            found = f"{tensor} does not divide spec.model.geometry.kvHeads {heads}"
        yield Problem(f"{role.path}.parallelism.tensor", found + words(_nearest_tensor(role, geometry)))


def gqa_dcp_replicas(context: Context) -> Iterator[Problem]:
    """With grouped-query attention, decodeContext divides the number of ranks that share a KV head.

    The ranks over which one sequence is sharded must hold the same KV head. That takes more tensor ranks than KV heads
    (tensor / kvHeads ranks share one), a decodeContext that divides their number, and one that divides the attention
    heads per KV head (attentionHeads / kvHeads). vLLM itself misses one case: tensor 12, kvHeads 2, decodeContext 4
    starts and attends across the caches of two heads.

    Lower decodeContext or raise tensor; models with multi-head latent attention (mla) have no such limit.
    """
    geometry = context.geometry
    if geometry is None or geometry.attention == "mla" or geometry.attention_heads % geometry.kv_heads:
        return
    for role in context.roles:
        tensor, size = role.settings.tensor, role.settings.decode_context
        if size == 1 or role.settings.prefill_context > 1 or not context_fits_tensor(size, tensor):
            continue
        if not context_fits_heads(size, tensor, geometry) and (found := _replica_message(role, geometry)):
            near = nearest(size, context_choices(tensor, geometry), lambda _: True)
            yield Problem(f"{role.path}.parallelism.decodeContext", found + words(near))


def _replica_message(role: RoleContext, geometry: Geometry) -> str | None:
    """Return which of the conditions fails; None where heads-divide-tp already says what is wrong with tensor."""
    tensor, size, heads = role.settings.tensor, role.settings.decode_context, geometry.kv_heads
    named = f"{size} with {role.path}.parallelism.tensor {tensor} and spec.model.geometry.kvHeads {heads}"
    if tensor <= heads:
        return f"{named}: a KV head is shared only if tensor is above kvHeads"
    if tensor % heads:
        return None
    shared = tensor // heads
    if shared % size:
        return f"{named}: {shared} ranks share a KV head, and decodeContext must divide that number"
    per_head = geometry.attention_heads // heads
    return f"{named}: {per_head} attention heads share a KV head, and decodeContext must divide that number"


def _nearest_tensor(role: RoleContext, geometry: Geometry) -> list[int]:
    """Return tensor sizes that suit the heads and this role's decodeContext, or, if there are none, the heads alone."""
    size = role.settings.decode_context
    candidates = [tensor for tensor in range(1, MAX_PARALLEL_SIZE + 1) if tensor_fits_heads(tensor, geometry)]
    near = nearest(
        role.settings.tensor,
        candidates,
        lambda tensor: context_fits_tensor(size, tensor) and context_fits_heads(size, tensor, geometry),
    )
    return near or nearest(role.settings.tensor, candidates, lambda _: True)


def interleave_divides_block(context: Context) -> Iterator[Problem]:
    """kvCacheInterleaveSize divides blockSize.

    A rank keeps kvCacheInterleaveSize consecutive tokens before the next rank's turn, and a turn never crosses a block.
    The engine ends at start-up otherwise.

    Set it to a divisor of blockSize, or leave it out: it is blockSize then, and whole blocks move.
    """
    for role in context.roles:
        size, block = role.stated.kv_cache_interleave_size, role.settings.block_size
        if size is not None and block % size:
            near = nearest(size, divisors(block), lambda _: True)
            yield Problem(
                f"{role.path}.kvCacheInterleaveSize",
                f"{size} does not divide {role.path}.blockSize {block}{words(near)}",
            )


def interleave_needs_dcp(context: Context) -> Iterator[Problem]:
    """kvCacheInterleaveSize has an effect only with decodeContext above 1 (a warning).

    With one shard there are no turns: every token lies on every rank of the group.

    Leave it out, or set decodeContext.
    """
    for role in context.roles:
        size = role.stated.kv_cache_interleave_size
        if size is not None and role.settings.decode_context == 1 and role.settings.prefill_context == 1:
            yield Problem(
                f"{role.path}.kvCacheInterleaveSize",
                f"{size} does nothing while {role.path}.parallelism.decodeContext is 1; leave it out "
                "or set decodeContext",
                Severity.WARNING,
            )


def data_local_fits_data(context: Context) -> Iterator[Problem]:
    """dataLocal divides data.

    dataLocal says how many of the data-parallel ranks run in one pod, and all pods of an engine are alike.

    Leave it out, which means all of them, or set it to a divisor of data.
    """
    for role in context.roles:
        sizes = role.settings
        if sizes.data % sizes.data_local:
            near = nearest(sizes.data_local, divisors(sizes.data), lambda _: True)
            yield Problem(
                f"{role.path}.parallelism.dataLocal",
                f"{sizes.data_local} does not divide {role.path}.parallelism.data {sizes.data}{words(near)}",
            )


def dcp_advice(context: Context) -> Iterator[Problem]:
    """Decode keeps copies of the KV cache that decode context parallelism would remove (a warning).

    With more tensor ranks than KV heads, tensor / kvHeads ranks store the same cache. decodeContext splits it by token
    instead, and the engine holds that many times the tokens.

    Set spec.decode.parallelism.decodeContext to the value that the message names.
    """
    role, geometry = context.decode, context.geometry
    tensor = role.settings.tensor
    if geometry is None or role.settings.decode_context > 1 or role.settings.prefill_context > 1:
        return
    heads = kv_heads(geometry)
    if tensor <= heads or not tensor_fits_heads(tensor, geometry):
        return
    best = context_choices(tensor, geometry)[-1]
    if best > 1:
        yield Problem(
            f"{role.path}.parallelism.decodeContext",
            f"1 with {role.path}.parallelism.tensor {tensor} and {heads} KV head{'s' if heads > 1 else ''} keeps "
            f"{tensor // heads} copies of the KV cache; {best} keeps {tensor // heads // best} and holds {best} times "
            "the tokens",
            Severity.WARNING,
        )


RULES = (
    Rule("geometry-consistent", geometry_consistent),
    Rule("dcp-divides-tp", dcp_divides_tp),
    Rule("pcp-dcp-sizes", pcp_dcp_sizes),
    Rule("heads-divide-tp", heads_divide_tp),
    Rule("gqa-dcp-replicas", gqa_dcp_replicas),
    Rule("interleave-divides-block", interleave_divides_block),
    Rule("interleave-needs-dcp", interleave_needs_dcp),
    Rule("data-local-fits-data", data_local_fits_data),
    Rule("dcp-advice", dcp_advice),
)
