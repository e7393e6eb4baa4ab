"""Rules on one role's sizes: what the engine needs to start and to compute rightly."""

from collections.abc import Iterator

from dcp_operator.api import sentences
from dcp_operator.api.findings import Severity
from dcp_operator.api.spec import MAX_PARALLEL_SIZE, Geometry
from dcp_operator.rules.context import Context, Problem, RoleContext, Rule
from dcp_operator.rules.edits import REMOVED, Fix
from dcp_operator.rules.geometry import (
    context_choices,
    context_fits_heads,
    context_fits_tensor,
    divisors,
    kv_heads,
    tensor_fits_heads,
)
from dcp_operator.rules.transfer import takes_pair


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
            path = f"{role.path}.parallelism.decodeContext"
            yield Problem(
                path,
                sentences.DCP_DIVIDES_TP.say(role=role.role, context=sizes.decode_context, tensor=sizes.tensor),
                fixes=_context_fixes(context, role),
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
                sentences.PCP_DCP_SIZES.say(
                    role=role.role, context=sizes.decode_context, prefill=sizes.prefill_context, tensor=sizes.tensor
                ),
                # The pair may be what a connector lacks, and then another prefillContext is the way out.
                fixes=(
                    *(Fix(f"{path}.decodeContext", size) for size in sorted({*allowed})),
                    Fix(f"{path}.prefillContext", 1),
                ),
            )
        if sizes.data > 1:
            yield Problem(
                f"{path}.prefillContext",
                sentences.PCP_NO_DATA.say(role=role.role, prefill=sizes.prefill_context, data=sizes.data),
                fixes=(Fix(f"{path}.prefillContext", 1), Fix(f"{path}.data", 1)),
            )


def geometry_consistent(context: Context) -> Iterator[Problem]:
    """The model's geometry agrees with itself.

    Multi-head latent attention (mla) caches one compressed head, so kvHeads is 1, whatever num_key_value_heads in
    config.json says. Otherwise every KV head serves equally many attention heads, so kvHeads divides attentionHeads.
    The other rules reckon with these numbers.

    Correct spec.model.geometry; leave it out if you don't know it, and the rules that need it are skipped with a
    warning.
    """
    geometry = context.spec.model.geometry
    if geometry is None:
        return
    path, heads = "spec.model.geometry.kvHeads", geometry.attention_heads
    if geometry.attention == "mla":
        if geometry.kv_heads != 1:
            yield Problem(path, sentences.MLA_ONE_HEAD.say(kv=geometry.kv_heads), fixes=(Fix(path, 1),))
    elif heads % geometry.kv_heads:
        # A number from config.json is read off, not chosen: the nearest that divides is no better than any other.
        yield Problem(path, sentences.KV_HEADS_DIVIDE.say(kv=geometry.kv_heads, heads=heads))


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
            found = f"{tensor} does not divide {context.model_path('attentionHeads')} {geometry.attention_heads}"
        elif tensor > heads:
            found = f"{tensor} is no multiple of {context.model_path('kvHeads')} {heads}"
        else:
            found = f"{tensor} does not divide {context.model_path('kvHeads')} {heads}"
        yield Problem(f"{role.path}.parallelism.tensor", found, fixes=_tensor_fixes(role, geometry))


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
        if not context_fits_heads(size, tensor, geometry) and (found := _replica_message(context, role, geometry)):
            fixes = (*_context_fixes(context, role), *_tensor_fixes(role, geometry))
            yield Problem(f"{role.path}.parallelism.decodeContext", found, fixes=fixes)


def _replica_message(context: Context, role: RoleContext, geometry: Geometry) -> str | None:
    """Return which of the conditions fails; None where heads-divide-tp already says what is wrong with tensor."""
    tensor, size, heads = role.settings.tensor, role.settings.decode_context, geometry.kv_heads
    named = f"{size} with {role.path}.parallelism.tensor {tensor} and {context.model_path('kvHeads')} {heads}"
    if tensor <= heads:
        return f"{named}: a KV head is shared only if tensor is above kvHeads"
    if tensor % heads:
        return None
    shared = tensor // heads
    if shared % size:
        return f"{named}: {shared} ranks share a KV head, and decodeContext must divide that number"
    per_head = geometry.attention_heads // heads
    return f"{named}: {per_head} attention heads share a KV head, and decodeContext must divide that number"


def _context_fixes(context: Context, role: RoleContext) -> tuple[Fix, ...]:
    """Return the decode context sizes that a role's tensor size and the model allow."""
    choices = context_choices(role.settings.tensor, context.geometry)
    return tuple(Fix(f"{role.path}.parallelism.decodeContext", size) for size in choices)


def _tensor_fixes(role: RoleContext, geometry: Geometry) -> tuple[Fix, ...]:
    """Return the tensor sizes that suit the model's heads."""
    choices = [size for size in divisors(geometry.attention_heads) if size <= MAX_PARALLEL_SIZE]
    return tuple(Fix(f"{role.path}.parallelism.tensor", size) for size in choices if tensor_fits_heads(size, geometry))


def interleave_divides_block(context: Context) -> Iterator[Problem]:
    """kvCacheInterleaveSize divides blockSize.

    A rank keeps kvCacheInterleaveSize consecutive tokens before the next rank's turn, and a turn never crosses a block.
    The engine ends at start-up otherwise.

    Set it to a divisor of blockSize, or leave it out: it is blockSize then, and whole blocks move.
    """
    for role in context.roles:
        size, block = role.stated.kv_cache_interleave_size, role.settings.block_size
        if size is not None and block % size:
            path = f"{role.path}.kvCacheInterleaveSize"
            yield Problem(
                path,
                sentences.INTERLEAVE_DIVIDES_BLOCK.say(role=role.role, interleave=size, block=block),
                fixes=tuple(Fix(path, divisor) for divisor in divisors(block)),
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
    """dataLocal divides data, and is all of it while an engine is one pod.

    dataLocal says how many of the data-parallel ranks run in one pod, and all pods of an engine are alike. The operator
    makes one pod for an engine, so ranks outside it would never come, and the engine would wait for them.

    Leave it out, which means all of them.
    """
    for role in context.roles:
        sizes = role.settings
        if sizes.data % sizes.data_local:
            path = f"{role.path}.parallelism.dataLocal"
            yield Problem(
                path,
                sentences.DATA_LOCAL_FITS_DATA.say(role=role.role, local=sizes.data_local, data=sizes.data),
                fixes=(*(Fix(path, size) for size in divisors(sizes.data)), Fix(path, REMOVED)),
            )
        elif sizes.data_local < sizes.data:
            path, data = f"{role.path}.parallelism.dataLocal", f"{role.path}.parallelism.data"
            yield Problem(
                path,
                sentences.DATA_LOCAL_ONE_POD.say(role=role.role, local=sizes.data_local, data=sizes.data),
                fixes=(Fix(path, sizes.data), Fix(path, REMOVED), Fix(data, sizes.data_local)),
            )


def dcp_advice(context: Context) -> Iterator[Problem]:
    """Decode keeps copies of the KV cache that decode context parallelism would remove (a warning).

    With more tensor ranks than KV heads, tensor / kvHeads ranks store the same cache. decodeContext splits it by token
    instead, and the engine holds that many times the tokens in the same memory.

    Set spec.decode.parallelism.decodeContext to the value that the message names.
    """
    role, geometry = context.decode, context.geometry
    tensor = role.settings.tensor
    if geometry is None or role.settings.decode_context > 1 or role.settings.prefill_context > 1:
        return
    heads = kv_heads(geometry)
    if tensor <= heads or not tensor_fits_heads(tensor, geometry):
        return
    path = f"{role.path}.parallelism.decodeContext"
    best = max((size for size in context_choices(tensor, geometry) if _works(context, Fix(path, size))), default=1)
    if best > 1:
        copies = tensor // heads // best
        left = "one copy" if copies == 1 else f"{copies} copies"
        yield Problem(
            path,
            f"1 with {role.path}.parallelism.tensor {tensor} and {heads} KV head{'s' if heads > 1 else ''} keeps "
            f"{tensor // heads} copies of the KV cache; {best} keeps {left} and holds {best} times the tokens in the "
            "same memory",
            Severity.WARNING,
        )


def _works(context: Context, fix: Fix) -> bool:
    """Whether a role with the change is one that the engine, the model and the connector take."""
    changed = context.changed(fix)
    return changed.facts is not None and changed.facts.keeps_every_token and not any(takes_pair(changed))


RULES = (
    Rule("geometry-consistent", geometry_consistent),
    Rule("dcp-divides-tp", dcp_divides_tp, sources=("vLLM config/parallel.py",)),
    Rule("pcp-dcp-sizes", pcp_dcp_sizes, sources=("vLLM config/parallel.py",)),
    Rule("heads-divide-tp", heads_divide_tp, sources=("vLLM config/model.py",), needs_model=True),
    Rule(
        "gqa-dcp-replicas",
        gqa_dcp_replicas,
        sources=("vLLM config/model.py", "the guide to context parallelism of vllm-ascend"),
        needs_model=True,
    ),
    Rule("interleave-divides-block", interleave_divides_block, sources=("vllm PR #26696", "vllm-ascend #14876")),
    Rule("interleave-needs-dcp", interleave_needs_dcp),
    Rule("data-local-fits-data", data_local_fits_data, sources=("vLLM config/parallel.py",)),
    Rule("dcp-advice", dcp_advice, sources=("vllm PR #26696",), needs_model=True),
)
