"""Where one side of a transfer keeps a token: shards, ranks, heads, rows and bytes.

For one side and one KV-cache group: T tensor parallel size, W decode context parallel (DCP) size, I interleave, B rows
of one rank's block, H KV heads of the model (1 for MLA). Token i of a sequence lies at

    virtual block = i // (B*W)                  index into the request's block table, shared by the ranks of a DCP group
    o             = i %  (B*W)
    shard         = (o // I) % W                equals (i // I) % W, because I divides B
    row           = (o // (I*W)) * I + o % I    row within the rank's block
    inverse:  i   = ((t // I)*W + shard) * I + t % I        with t the row counted over all blocks of the shard

The placement is vLLM's (`v1/worker/block_table.py`, slot mapping), the count per shard its `get_dcp_local_seq_lens`.
Ranks: when T >= H a head is held by rep = T/H consecutive ranks, and DCP groups are runs of W consecutive ranks, so
rank h*rep + k*W + c holds head h and shard c for every replica k < rep/W. When T < H a rank holds H/T heads; W is 1.

This is the only module that reasons about parallelism; it uses numpy for types alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dcp_connector.units import GlobalHead, LayoutError, LocalHead, cdiv

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dcp_connector.units import IntArray

__all__ = ["GeometryError", "PageLayout", "SideLayout", "Violation", "find_violations"]

_INT64_MAX = 2**63 - 1
#: Far above any real size; a peer's nonsense must not become a long search for the nearest value that works.
_MAX_SIZE = 1 << 20


class Violation(NamedTuple):
    """One broken rule of a side: `rule` from the closed list of admission rules, `message` for a person."""

    rule: str
    message: str


class GeometryError(LayoutError):
    """A side or a page that can't exist, or two sides that can't exchange KV. `violations` lists every broken rule."""

    def __init__(self, violations: tuple[Violation, ...]) -> None:
        super().__init__("; ".join(violation.message for violation in violations))
        self.violations = violations


def _nearest(value: int, allowed: Iterable[int]) -> str:
    """Name the closest allowed values below and above `value`, as words."""
    choices = sorted(set(allowed))
    below = [choice for choice in choices if choice <= value]
    above = [choice for choice in choices if choice > value]
    return " or ".join(str(choice) for choice in below[-1:] + above[:1])


def _divisors(value: int) -> list[int]:
    return [divisor for divisor in range(1, value + 1) if value % divisor == 0]


def find_violations(
    *, tensor_parallel_size: int, dcp_size: int, interleave: int, block_size: int, num_kv_heads: int
) -> tuple[Violation, ...]:
    """Return every rule that these sizes break, in a fixed order; an empty tuple means that the side is valid.

    B % I == 0 (only asked when W > 1: with one shard the interleave has no effect);
    T >= H: T % H == 0 and (T/H) % W == 0;  T < H: H % T == 0 and W == 1.
    vLLM itself misses (T/H) % W == 0: with T 12, H 2, W 4 the group of ranks 4..7 holds two heads and mixes them.
    """
    sizes = {
        "tensor parallel size": tensor_parallel_size,
        "dcp size": dcp_size,
        "interleave": interleave,
        "block size": block_size,
        "number of KV heads": num_kv_heads,
    }
    out_of_range = tuple(
        Violation("size-in-range", f"{name} is {value}; it has to be from 1 to {_MAX_SIZE}")
        for name, value in sizes.items()
        if not 1 <= value <= _MAX_SIZE
    )
    if out_of_range:
        return out_of_range

    found: list[Violation] = []
    t, w, h = tensor_parallel_size, dcp_size, num_kv_heads
    if t % h and h % t:
        workable = [*_divisors(h), (t // h + 1) * h, t // h * h or h]
        found.append(
            Violation(
                "heads-divide-tp",
                f"tensor parallel size {t} and {h} KV heads: one has to be a multiple of the other; "
                f"nearest tensor parallel size that works: {_nearest(t, workable)}",
            )
        )
    elif t < h:
        if w > 1:
            found.append(
                Violation(
                    "gqa-dcp-replicas",
                    f"dcp size {w} with tensor parallel size {t} and {h} KV heads: each rank holds {h // t} heads of "
                    f"its own, so no two ranks share a head's tokens; use dcp size 1 or tensor parallel size {h * w}",
                )
            )
    elif (t // h) % w:
        replicas = t // h
        rule = "gqa-dcp-replicas" if t % w == 0 else "dcp-divides-tp"
        found.append(
            Violation(
                rule,
                f"dcp size {w} doesn't divide the {replicas} ranks that hold each KV head (tensor parallel size {t} / "
                f"{h} KV heads), so a DCP group would mix heads; nearest dcp size that works: "
                f"{_nearest(w, _divisors(replicas))}",
            )
        )
    if w > 1 and block_size % interleave:
        found.append(
            Violation(
                "interleave-divides-block",
                f"interleave {interleave} doesn't divide block size {block_size}; "
                f"nearest interleave that does: {_nearest(interleave, _divisors(block_size))}",
            )
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class SideLayout:
    """One side of a transfer, for one KV-cache group. Hashable: plans are cached by pairs of these.

    Raises `GeometryError` with every broken rule when the sizes don't fit together. With one shard the interleave has
    no effect and is set to the block size, so that equal layouts compare equal. For a group that DCP doesn't shard
    pass `dcp_size=1`.
    """

    tensor_parallel_size: int
    """T: ranks of the engine (prefill context parallel size 1)."""
    dcp_size: int
    """W: shards of the sequence."""
    interleave: int
    """I: consecutive tokens that stay on one shard."""
    block_size: int
    """B: rows of one rank's block, in tokens; the scheduler counts blocks of B*W tokens."""
    num_kv_heads: int
    """H: KV heads of the model; 1 for MLA."""

    def __post_init__(self) -> None:
        violations = find_violations(
            tensor_parallel_size=self.tensor_parallel_size,
            dcp_size=self.dcp_size,
            interleave=self.interleave,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
        )
        if violations:
            raise GeometryError(violations)
        if self.dcp_size == 1:
            object.__setattr__(self, "interleave", self.block_size)

    @property
    def virtual_block_size(self) -> int:
        """B*W: tokens that one entry of a block table covers."""
        return self.block_size * self.dcp_size

    @property
    def ranks_per_head(self) -> int:
        """Ranks that hold one head, over all shards and replicas: T/H, or 1 when T < H."""
        return max(1, self.tensor_parallel_size // self.num_kv_heads)

    @property
    def heads_per_rank(self) -> int:
        """Heads in one rank's tensor: 1 when T >= H, else H/T."""
        return max(1, self.num_kv_heads // self.tensor_parallel_size)

    def num_blocks(self, num_tokens: int) -> int:
        """Return the length of the block table of a sequence: cdiv(n, B*W)."""
        return cdiv(num_tokens, self.virtual_block_size)

    def shard_of_rank(self, rank: int) -> int:
        """Return the shard that a rank holds: rank % W."""
        self._check_rank(rank)
        return rank % self.dcp_size

    def heads_of_rank(self, rank: int) -> tuple[GlobalHead, ...]:
        """Return the heads in a rank's tensor, ascending."""
        self._check_rank(rank)
        first = rank // self.ranks_per_head * self.heads_per_rank
        return tuple(GlobalHead(head) for head in range(first, first + self.heads_per_rank))

    def local_heads(self, rank: int, heads: Iterable[GlobalHead]) -> tuple[LocalHead, ...]:
        """Return where a rank's tensor keeps these heads. Raises `GeometryError` for a head that it doesn't hold."""
        held = self.heads_of_rank(rank)
        found: list[LocalHead] = []
        for head in heads:
            if head not in held:
                raise GeometryError(
                    (Violation("rank-holds-head", f"rank {rank} holds KV heads {held[0]} to {held[-1]}, not {head}"),)
                )
            found.append(LocalHead(head - held[0]))
        return tuple(found)

    def ranks_holding(self, head: int, shard: int) -> tuple[int, ...]:
        """Return the ranks that hold (head, shard), ascending: its replicas, equal in content."""
        if not 0 <= head < self.num_kv_heads:
            raise GeometryError(
                (Violation("head-in-range", f"head {head} is not one of the {self.num_kv_heads} KV heads"),)
            )
        self._check_shard(shard)
        first = head // self.heads_per_rank * self.ranks_per_head
        return tuple(range(first + shard, first + self.ranks_per_head, self.dcp_size))

    def place(self, tokens: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return (virtual block index, shard, row in the rank's block) of each token number."""
        offset = tokens % self.virtual_block_size
        shard = offset // self.interleave % self.dcp_size
        row = offset // (self.interleave * self.dcp_size) * self.interleave + offset % self.interleave
        return tokens // self.virtual_block_size, shard, row

    def token_of(self, shard: int, local_rows: IntArray) -> IntArray:
        """Return the token number at each row of a shard; rows count over all of its blocks: block index * B + row."""
        self._check_shard(shard)
        stripe, within = local_rows // self.interleave, local_rows % self.interleave
        return (stripe * self.dcp_size + shard) * self.interleave + within

    def local_token_count(self, num_tokens: int, shard: int) -> int:
        """Return how many of the first `num_tokens` tokens a shard holds (vLLM: `get_dcp_local_seq_lens`).

        A shard's rows are in token order, so the tokens of [start, end) on it are exactly its rows
        [local_token_count(start), local_token_count(end)).
        """
        self._check_shard(shard)
        base = num_tokens // self.interleave // self.dcp_size * self.interleave
        rest = num_tokens - base * self.dcp_size - shard * self.interleave
        return base + min(max(rest, 0), self.interleave)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.tensor_parallel_size:
            words = f"rank {rank} is not one of the {self.tensor_parallel_size} tensor parallel ranks"
            raise GeometryError((Violation("rank-in-range", words),))

    def _check_shard(self, shard: int) -> None:
        if not 0 <= shard < self.dcp_size:
            raise GeometryError(
                (Violation("shard-in-range", f"shard {shard} is not one of the {self.dcp_size} shards"),)
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """Where one rank's registered tensor of one layer keeps (kernel block, head, row), in bytes.

    address(block, head, row) = base + kb*block_stride + head*head_stride + (row % kernel_block_size)*row_stride
    kb, the kernel block      = block * (block_size // kernel_block_size) + row // kernel_block_size

    Strides are those of the tensor itself, so every physical order (head-major, token-major, layers within a block)
    is the same formula. A tensor that keeps K and V apart is two layers. The stride of a dimension of size 1 is
    never used. Raises `GeometryError` when two entries would overlap or the end wouldn't fit in an address.
    """

    base: int
    """Address of entry (0, 0, 0); includes the tensor's storage offset."""
    num_blocks: int
    """Kernel blocks in the tensor."""
    kernel_block_size: int
    """Rows of the attention kernel's block; divides block_size."""
    block_size: int
    """B: rows of the scheduler's block on this rank."""
    num_heads: int
    """Heads in this rank's tensor."""
    block_stride: int
    """Bytes from one kernel block to the next."""
    head_stride: int
    row_stride: int
    entry_bytes: int
    """C: contiguous bytes of one (token, head)."""

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise GeometryError((Violation("page-layout", problem),))

    @property
    def kernel_blocks_per_block(self) -> int:
        """Kernel blocks that make one scheduler block."""
        return self.block_size // self.kernel_block_size

    @property
    def span_bytes(self) -> int:
        """Bytes from `base` to the end of the last entry."""
        return self.entry_bytes + sum((size - 1) * stride for size, stride in self._dimensions())

    @property
    def end(self) -> int:
        """Address just past the last entry; [base, end) has to lie in registered memory."""
        return self.base + self.span_bytes

    def _dimensions(self) -> tuple[tuple[int, int], ...]:
        """Return (size, stride) of each dimension that has a second element."""
        dimensions = (
            (self.num_blocks, self.block_stride),
            (self.num_heads, self.head_stride),
            (self.kernel_block_size, self.row_stride),
        )
        return tuple((size, stride) for size, stride in dimensions if size > 1)

    def _problem(self) -> str | None:
        counts = (self.num_blocks, self.kernel_block_size, self.block_size, self.num_heads, self.entry_bytes)
        if min(counts) < 1:
            return f"a page layout needs counts of 1 or more, got {self}"
        if self.block_size % self.kernel_block_size:
            return f"kernel block size {self.kernel_block_size} doesn't divide block size {self.block_size}"
        covered = self.entry_bytes
        for size, stride in sorted(self._dimensions(), key=lambda dimension: dimension[1]):
            if stride < covered:
                return f"entries overlap: a stride of {stride} bytes steps over {covered} bytes of content in {self}"
            covered += (size - 1) * stride
        if self.base < 0 or self.end > _INT64_MAX:
            return f"addresses {self.base} to {self.end} don't fit in 63 bits"
        return None
