"""`dcpctl plan`: which sizes suit a model and its GPUs, and what decode context parallelism gains."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dcp_operator.api.quantities import QuantityError, parse_quantity
from dcp_operator.catalogue import Catalogue, ModelFacts, builtin
from dcp_operator.cli.plan_object import planned_object
from dcp_operator.cli.problems import EXIT_ALLOWED, EXIT_REFUSED, CliError, Outcome
from dcp_operator.cli.yaml_io import write_document
from dcp_operator.kv_size import ELEMENT_BYTES, KvSize, bytes_per_token
from dcp_operator.rules.geometry import context_choices, divisors, tensor_fits_heads
from dcp_operator.settings import Role

#: Stands above an object: what a plan can't know of the cluster.
_ABOUT_TCP: Final = (
    "# KV moves by TCP, which works everywhere. With RDMA it is faster: set kvConnector.protocol to rdma, and\n"
    "# kvConnector.rdma.resourceName to what your nodes call their RDMA devices.\n"
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What `dcpctl plan` is asked, as it was written."""

    model: str
    gpu_memory: str
    gpus_per_node: int
    context: int
    weights: str
    reserve: str
    utilization: float
    block_size: int
    kv_cache_dtype: str
    role: str
    choose: str | None
    image: str
    output: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One legal choice of sizes for an engine within a node."""

    tensor: int
    decode_context: int
    size: KvSize
    engines_per_node: int
    tokens_without: int

    @property
    def gain(self) -> float:
        """Tokens held, as a multiple of what the same ranks hold without decode context parallelism."""
        return self.size.tokens / self.tokens_without

    @property
    def tokens_per_node(self) -> int:
        """Tokens that all engines of a node hold together."""
        return self.size.tokens * self.engines_per_node


def plan(asked: Asked, *, catalogue: Catalogue | None = None) -> Outcome:
    """Return the legal choices of each role as a table or JSON, and the object of the chosen ones.

    Raises CliError for what can't be reckoned, with what to state instead.
    """
    models = catalogue or builtin()
    facts = models.lookup(asked.model)
    if facts is None:
        raise CliError(
            f"the catalogue has no model {asked.model}; put the numbers of its config.json into a file and name that "
            "with --catalogue"
        )
    if facts.max_model_len is not None and asked.context > facts.max_model_len:
        raise CliError(f"--context {asked.context} is above what {asked.model} supports, {facts.max_model_len}")
    roles = [Role(asked.role)] if asked.role != "both" else list(Role)
    tables = {role: choices(asked, facts, role) for role in roles}
    if not all(tables.values()):
        raise CliError(
            f"no legal choice holds one sequence of {asked.context} tokens beside {asked.weights} of weights; use more "
            "or larger GPUs, a smaller --context, or a --kv-cache-dtype of fewer bytes"
        )
    if asked.choose is not None:
        return _chosen(asked, facts, tables, models)
    if asked.output == "json":
        return Outcome(
            EXIT_ALLOWED, json.dumps({role: list(map(_row, found)) for role, found in tables.items()}) + "\n"
        )
    return Outcome(EXIT_ALLOWED, "".join(f"{line}\n" for line in _text(asked, facts, tables)))


def choices(asked: Asked, facts: ModelFacts, role: Role) -> list[Choice]:
    """Return every legal choice that holds a sequence of the asked length, the best first.

    For decode the best holds the most tokens per node. Prefill keeps a cache only while a prompt is computed, and
    decode context parallelism costs it communication: the best is without it, then what holds the most tokens.
    """
    geometry = facts.geometry
    found: list[Choice] = []
    for tensor in divisors(asked.gpus_per_node):
        if not tensor_fits_heads(tensor, geometry):
            continue
        available = int(
            size_of(asked.gpu_memory) * asked.utilization - size_of(asked.weights) / tensor - size_of(asked.reserve)
        )
        try:
            per_token = bytes_per_token(facts, tensor, ELEMENT_BYTES[asked.kv_cache_dtype])
        except ValueError as error:
            raise CliError(f"{asked.model} can't be planned: {error}") from error
        plain = KvSize(per_token, asked.block_size, 1, available)
        for context in context_choices(tensor, geometry):
            size = KvSize(per_token, asked.block_size, context, available)
            if size.blocks >= size.blocks_for(asked.context):
                found.append(Choice(tensor, context, size, asked.gpus_per_node // tensor, plain.tokens))
    if role is Role.DECODE:
        return sorted(found, key=lambda choice: (-choice.tokens_per_node, choice.decode_context, choice.tensor))
    return sorted(found, key=lambda choice: (choice.decode_context, -choice.tokens_per_node, choice.tensor))


def size_of(text: str) -> int:
    """Return the bytes that a text such as 80GiB, 80Gi or 141GB stands for. Raises CliError."""
    try:
        return int(parse_quantity(text.strip().removesuffix("B")))
    except QuantityError as error:
        raise CliError(f"{text!r} is no size; write it as 80GiB or 141GB") from error


def interleaves(block_size: int) -> list[int]:
    """Return every interleave size that a block size allows, the one that moves whole blocks first."""
    return divisors(block_size)[::-1]


def _chosen(asked: Asked, facts: ModelFacts, tables: dict[Role, list[Choice]], models: Catalogue) -> Outcome:
    if set(tables) != set(Role):
        raise CliError("--choose prints an object of both roles; leave --role out")
    match = re.fullmatch(r"(?:(\d+),)?(\d+)", asked.choose or "")
    if match is None:
        raise CliError(f"--choose {asked.choose}: write the number of decode's row, or PREFILL,DECODE such as 1,2")
    rows = {Role.PREFILL: int(match[1] or 1), Role.DECODE: int(match[2])}
    picked: dict[Role, Choice] = {}
    for role, number in rows.items():
        if not 1 <= number <= len(tables[role]):
            raise CliError(f"--choose {asked.choose}: {role} has the rows 1 to {len(tables[role])}")
        picked[role] = tables[role][number - 1]
    sizes = {role: (choice.tensor, choice.decode_context) for role, choice in picked.items()}
    body, report = planned_object(
        asked.model, facts, sizes, asked.context, asked.block_size, asked.kv_cache_dtype, asked.image, models
    )
    notes = tuple(f"{finding}" for finding in (*report.violations, *report.warnings))
    return Outcome(EXIT_ALLOWED if report.allowed else EXIT_REFUSED, _ABOUT_TCP + write_document(body), notes)


def _text(asked: Asked, facts: ModelFacts, tables: dict[Role, list[Choice]]) -> Iterator[str]:
    shape = "latent attention" if facts.attention == "mla" else f"{facts.kv_heads} KV heads"
    yield (
        f"{asked.model}: {facts.attention_heads} attention heads, {shape}, {facts.layers} layers; "
        f"{asked.gpus_per_node} GPUs per node with {asked.gpu_memory}, of which {asked.utilization:g} is used, less "
        f"{asked.weights} of weights over the tensor ranks and {asked.reserve} for the rest"
    )
    whole, *others = interleaves(asked.block_size)
    for role, found in tables.items():
        yield ""
        yield f"{role}, the best first:"
        yield from _table(
            ("", "tensor", "decodeContext", "KV bytes/token/GPU", "tokens held", "tokens/node", "gain", "requests"),
            [
                (
                    str(number),
                    str(choice.tensor),
                    str(choice.decode_context),
                    f"{choice.size.bytes_per_token}",
                    f"{choice.size.tokens}",
                    f"{choice.tokens_per_node}",
                    f"{choice.gain:.2f}x",
                    f"{choice.size.requests(asked.context):.1f}",
                )
                for number, choice in enumerate(found, 1)
            ],
        )
    yield ""
    yield (
        f"kvCacheInterleaveSize with decodeContext above 1: {whole} moves whole blocks; {', '.join(map(str, others))} "
        "are legal too and hold as much"
    )
    yield f"gain: over the same ranks with decodeContext 1; requests: of {asked.context} tokens at once, per engine"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(choice: Choice) -> dict[str, Any]:
    return {
        "tensor": choice.tensor,
        "decodeContext": choice.decode_context,
        "kvCacheInterleaveSizes": interleaves(choice.size.block_size) if choice.decode_context > 1 else [],
        "kvBytesPerTokenAndGpu": choice.size.bytes_per_token,
        "tokensHeld": choice.size.tokens,
        "tokensPerNode": choice.tokens_per_node,
        "gain": round(choice.gain, 4),
    }
