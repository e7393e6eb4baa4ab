"""What the two sides tell each other about themselves, and whether they fit.

`GET /v1/topology` on the bootstrap port answers a `Topology` as JSON, with the header `X-DCP-Signature`, the hex HMAC
of the body (`wire.sign`). Facts come from the workers; the scheduler process only collects and serves them.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from dcp_connector.errors import PeerError, Reason, StartupError
from dcp_connector.geometry import GeometryError, PageLayout, SideLayout
from dcp_connector.page_sets import askable, layer_of, offered
from dcp_connector.siblings import data_parallel_rank
from dcp_connector.wire import PROTOCOL_VERSION, Layout, Page

#: HTTP header that authenticates a topology.
SIGNATURE_HEADER = "X-DCP-Signature"
#: Longest topology that is read: 400 ranks of 200 layers stay below it.
MAX_TOPOLOGY_BYTES = 16 * 1024 * 1024

_Text = Annotated[str, msgspec.Meta(max_length=512)]


class SideFacts(msgspec.Struct, frozen=True):
    """What every rank of one engine agrees on.

    `page_format` is "rows" when one (token, head) entry is contiguous bytes at the address that kv-mapping gives, and
    "opaque" when only whole pages can be copied (an attention backend that packs tokens of a page together).
    """

    engine_id: _Text
    role: Literal["kv_producer", "kv_consumer", "kv_both"]
    #: hash of the model facts that decide what a KV entry means, and a name for people
    model_hash: _Text
    model: _Text
    kv_dtype: _Text
    page_format: Literal["rows", "opaque"]
    layout: Layout
    pipeline_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    #: bytes of the key in an entry that holds key and value, one behind the other; 0 where entries can't be cut so
    key_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**40)] = 0


class RankFacts(msgspec.Struct, frozen=True):
    """What one worker knows of itself.

    `control` is its ROUTER's "tcp://host:port", empty on a pure consumer; `health` the "host:port" where it answers
    /healthz, for its own engine only.
    """

    side: SideFacts
    tp_rank: Annotated[int, msgspec.Meta(ge=0, le=2**20)]
    pp_rank: Annotated[int, msgspec.Meta(ge=0, le=1024)]
    control: _Text
    pages: dict[_Text, Page]
    health: _Text = ""


class RankEntry(msgspec.Struct, frozen=True):
    """One rank in a topology."""

    tp_rank: Annotated[int, msgspec.Meta(ge=0, le=2**20)]
    pp_rank: Annotated[int, msgspec.Meta(ge=0, le=1024)]
    control: _Text
    pages: dict[_Text, Page]


class Topology(msgspec.Struct, frozen=True):
    """One engine: its facts and all of its ranks. `generation` differs after every restart."""

    protocol: int
    generation: _Text
    side: SideFacts
    ranks: list[RankEntry]


def side_layout(layout: Layout) -> SideLayout:
    """Return the validated geometry. Raises GeometryError in words."""
    return SideLayout(
        tensor_parallel_size=layout.tensor_parallel_size,
        dcp_size=layout.dcp_size,
        interleave=layout.interleave,
        block_size=layout.block_size,
        num_kv_heads=layout.num_kv_heads,
    )


def wire_layout(side: SideLayout) -> Layout:
    """The inverse of `side_layout`."""
    return Layout(side.tensor_parallel_size, side.dcp_size, side.interleave, side.block_size, side.num_kv_heads)


def page_layout(page: Page, side: SideLayout) -> PageLayout:
    """Return where a rank of `side` keeps one layer. Raises GeometryError when entries would overlap."""
    return PageLayout(
        base=page.base,
        num_blocks=page.num_blocks,
        kernel_block_size=page.kernel_block_size,
        block_size=side.block_size,
        num_heads=side.heads_per_rank,
        block_stride=page.block_stride,
        head_stride=page.head_stride,
        row_stride=page.row_stride,
        entry_bytes=page.entry_bytes,
    )


def wire_page(page: PageLayout) -> Page:
    """The inverse of `page_layout`."""
    return Page(
        page.base,
        page.num_blocks,
        page.kernel_block_size,
        page.block_stride,
        page.head_stride,
        page.row_stride,
        page.entry_bytes,
    )


def assemble(generation: str, ranks: Sequence[RankFacts]) -> Topology:
    """Return the engine's topology. Raises StartupError when ranks are missing or disagree about their engine."""
    if not ranks:
        raise StartupError("no worker reported its KV pages to the connector: nothing can be transferred")
    side = ranks[0].side
    for rank in ranks:
        if rank.side != side:
            raise StartupError(
                f"worker tp {rank.tp_rank} pp {rank.pp_rank} describes its engine as {rank.side}, "
                f"worker tp {ranks[0].tp_rank} pp {ranks[0].pp_rank} as {side}: start all ranks with the same flags"
            )
    found = sorted((rank.pp_rank, rank.tp_rank) for rank in ranks)
    wanted = [(pp, tp) for pp in range(side.pipeline_parallel_size) for tp in range(side.layout.tensor_parallel_size)]
    if found != wanted:
        raise StartupError(f"workers (pp, tp) {found} reported to the connector, expected {wanted}")
    entries = [RankEntry(rank.tp_rank, rank.pp_rank, rank.control, rank.pages) for rank in ranks]
    entries.sort(key=lambda entry: (entry.pp_rank, entry.tp_rank))
    return Topology(protocol=PROTOCOL_VERSION, generation=generation, side=side, ranks=entries)


def encode_topology(topology: Topology) -> bytes:
    """Return the JSON that /v1/topology serves."""
    return msgspec.json.encode(topology)


class _Version(msgspec.Struct):
    protocol: int


def decode_topology(body: bytes) -> Topology:
    """Return the peer's topology. The protocol version is compared before anything else is looked at.

    Raises PeerError: BOOTSTRAP_GARBAGE for what isn't a topology, INCOMPATIBLE for another protocol version.
    """
    try:
        protocol = msgspec.json.decode(body, type=_Version).protocol
        if protocol != PROTOCOL_VERSION:
            raise PeerError(
                Reason.INCOMPATIBLE,
                f"prefill's connector speaks protocol {protocol}, this one {PROTOCOL_VERSION}: "
                "run the same connector version on both roles",
            )
        topology = msgspec.json.decode(body, type=Topology)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(Reason.BOOTSTRAP_GARBAGE, f"the answer is not a topology: {error}") from error
    found = [(rank.pp_rank, rank.tp_rank) for rank in topology.ranks]
    side = topology.side
    if len(found) != side.pipeline_parallel_size * side.layout.tensor_parallel_size or len(set(found)) != len(found):
        raise PeerError(Reason.BOOTSTRAP_GARBAGE, f"the topology lists the ranks (pp, tp) {found[:32]}")
    return topology


def query_answer(topology: Topology) -> dict[str, object]:
    """Return what routers expect from GET /query: data-parallel rank -> engine id and worker addresses, no more."""
    addresses: dict[str, dict[str, str]] = {}
    for rank in topology.ranks:
        addresses.setdefault(str(rank.tp_rank), {})[str(rank.pp_rank)] = rank.control
    rank = data_parallel_rank(topology.side.engine_id) or 0
    return {str(rank): {"engine_id": topology.side.engine_id, "worker_addr": addresses}}


def find_mismatches(prefill: Topology, decode: RankFacts) -> tuple[str, ...]:
    """Return, in words that name both values, everything that forbids a transfer between the two; empty if they fit."""
    theirs, ours = prefill.side, decode.side
    found: list[str] = []

    def compare(what: str, prefill_value: object, decode_value: object, remedy: str) -> None:
        if prefill_value != decode_value:
            found.append(f"{what}: prefill has {prefill_value}, decode has {decode_value}; {remedy}")

    if theirs.role == "kv_consumer":
        found.append(f"role: engine {theirs.engine_id} is a kv_consumer, expected a kv_producer or kv_both")
    if theirs.model_hash != ours.model_hash:
        found.append(
            f"model: prefill serves {theirs.model} ({theirs.model_hash}), decode {ours.model} ({ours.model_hash}); "
            "both roles have to serve the same model with the same dtype and quantization"
        )
    compare("KV dtype", theirs.kv_dtype, ours.kv_dtype, "set --kv-cache-dtype and --dtype alike on both roles")
    compare("KV heads", theirs.layout.num_kv_heads, ours.layout.num_kv_heads, "both roles have to serve the same model")
    compare("page format", theirs.page_format, ours.page_format, "use the same attention backend on both roles")
    try:
        side_layout(theirs.layout)
    except GeometryError as error:
        found.append(f"layout of prefill: {error}")
    found.extend(_page_mismatches(prefill, decode))
    if "opaque" in (theirs.page_format, ours.page_format):
        found.extend(_opaque_mismatches(prefill, decode))
    return tuple(found)


def _layers(topology: Topology) -> dict[str, Page]:
    return {name: page for rank in topology.ranks for name, page in rank.pages.items()}


def layers_of(rank: RankEntry) -> frozenset[str]:
    """Return the layers that a rank holds."""
    return frozenset(layer_of(name) for name in rank.pages)


def pages_to_ask(prefill: Topology, decode: RankFacts) -> dict[str, Page]:
    """Return a decode rank's pages under the names and in the pieces in which prefill can be asked for them."""
    return askable(decode.pages, _layers(prefill), decode.side.key_bytes)


def _page_mismatches(prefill: Topology, decode: RankFacts) -> list[str]:
    found: list[str] = []
    theirs, wanted = _layers(prefill), pages_to_ask(prefill, decode)
    supply = offered(theirs, prefill.side.key_bytes)
    missing = wanted.keys() - supply.keys()
    beyond = {layer_of(name) for name in theirs} - {layer_of(name) for name in decode.pages}
    if decode.side.pipeline_parallel_size > 1:
        beyond = set[str]()  # the other stages' layers
    if missing or beyond:
        found.append(
            f"layers: prefill has {len(theirs)}, decode {len(decode.pages)}; only on prefill {sorted(beyond)[:4]}, "
            f"only on decode {sorted(missing)[:4]}; both roles have to serve the same model"
        )
    for name in sorted(wanted.keys() & supply.keys()):
        if supply[name].entry_bytes != wanted[name].entry_bytes:
            found.append(
                f"bytes of one token and head in {name}: prefill has {supply[name].entry_bytes}, "
                f"decode has {wanted[name].entry_bytes}; use the same KV dtype and attention backend on both roles"
            )
            break
    return found


def _opaque_mismatches(prefill: Topology, decode: RankFacts) -> list[str]:
    """Pages that can only be copied whole need the same geometry and the same strides on both sides."""
    found: list[str] = []
    remedy = "its attention backend packs a page's tokens together, so only equal layouts can exchange whole pages"
    if prefill.side.layout != decode.side.layout:
        found.append(f"layout: prefill has {prefill.side.layout}, decode has {decode.side.layout}; {remedy}")
    if prefill.side.layout.dcp_size > 1 or decode.side.layout.dcp_size > 1:
        found.append(
            f"DCP size: prefill has {prefill.side.layout.dcp_size}, decode has {decode.side.layout.dcp_size}, and "
            "whole pages need 1; use an attention backend that supports DCP on both roles"
        )
    theirs = _layers(prefill)
    for name in sorted(theirs.keys() & decode.pages.keys()):
        shape_p, shape_d = _page_shape(theirs[name]), _page_shape(decode.pages[name])
        if shape_p != shape_d:
            found.append(f"page of {name}: prefill has {shape_p}, decode has {shape_d}; {remedy}")
            break
    return found


def _page_shape(page: Page) -> tuple[int, int, int, int]:
    return page.kernel_block_size, page.block_stride, page.head_stride, page.row_stride
