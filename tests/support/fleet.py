"""The engines that the tests of pairs and of proxies share, so that each is started once.

With prefill and decode engines of each kind every prefill engine meets every decode engine; prompts of different pairs
have nothing in common, so an engine's prefix cache never answers for another pair. All engines cache prefixes, and
compute prompts in chunks of at most 256 tokens, two of them in chunks of 48, which end within blocks.

Prefill chooses the path. Here each of its engines has its own: one is told to pack, one to write directly, one to
scatter, and one chooses by itself, which is to scatter where fragments are as small as with DCP.

A failed load is an error here, never a silent recomputation.
"""

from dataclasses import dataclass
from functools import cached_property

from dcp_connector.paths import Path
from tests.support.engines import EnginePool, EngineSpec
from tests.support.pd_pair import PDPair
from tests.support.prompts import pair_prompts

__all__ = [
    "FLEET",
    "FLOW_DECODES",
    "FLOW_PREFILLS",
    "MAX_TOKENS",
    "PAIRS",
    "PLAIN",
    "PairSpec",
    "expected_answers",
    "flow_prompts",
]

MAX_TOKENS = 8
_SMALL_CHUNKS = ("--max-num-batched-tokens=48",)

PLAIN = EngineSpec()
PREFILL_ONE = EngineSpec(role="kv_producer", connector=(("path", "pack"),))
PREFILL_DCP = EngineSpec(tensor=2, dcp=2, interleave=32, role="kv_producer", args=_SMALL_CHUNKS)
DECODE_ONE = EngineSpec(role="kv_consumer")
DECODE_DCP = EngineSpec(tensor=2, dcp=2, interleave=1, role="kv_consumer")
DECODE_TWO = EngineSpec(tensor=2, block=48, role="kv_consumer")
FLEET = (PREFILL_ONE, PREFILL_DCP, DECODE_ONE, DECODE_DCP, DECODE_TWO)

# Two KV heads. Engines of both roles are prefill to one another.
PLAIN_GQA = EngineSpec(model="tiny-gqa")
GQA_ONE = EngineSpec(model="tiny-gqa", block=64, role="kv_both", connector=(("path", "direct"),))
GQA_SPLIT = EngineSpec(model="tiny-gqa", tensor=2, role="kv_both", connector=(("path", "scatter"),), args=_SMALL_CHUNKS)
GQA_DCP = EngineSpec(model="tiny-gqa", tensor=4, dcp=2, interleave=8, role="kv_consumer")
FLEET_GQA = (GQA_ONE, GQA_SPLIT, GQA_DCP)

#: What stands behind a router: two engines of each role, of different layouts.
FLOW_PREFILLS = (PREFILL_ONE, PREFILL_DCP)
FLOW_DECODES = (DECODE_ONE, DECODE_DCP)


@dataclass(frozen=True)
class PairSpec:
    """A prefill and a decode engine, the engines that run beside them, and the one that knows nothing of P/D."""

    name: str
    prefill: EngineSpec
    decode: EngineSpec
    #: that all of its KV takes
    path: Path
    fleet: tuple[EngineSpec, ...] = FLEET
    plain: EngineSpec = PLAIN

    @cached_property
    def prompts(self) -> tuple[list[str], list[str]]:
        """Prompts, and prompts that meet what the first left in the caches (`prompts.pair_prompts`)."""
        return pair_prompts([_layout(self.prefill), _layout(self.decode)], self.name)

    def start(self, pool: EnginePool) -> PDPair:
        """Return the pair; the engines beside it run too."""
        pool.get(*self.fleet)
        return PDPair(*pool.get(self.prefill, self.decode))


def _gqa(name: str, prefill: EngineSpec, decode: EngineSpec, path: Path) -> PairSpec:
    return PairSpec(name, prefill, decode, path, FLEET_GQA, PLAIN_GQA)


PAIRS = (
    PairSpec("equal layouts", PREFILL_ONE, DECODE_ONE, "pack"),
    PairSpec("one rank to DCP 2, token by token", PREFILL_ONE, DECODE_DCP, "pack"),
    PairSpec("one rank to two replicas, blocks of 32 to blocks of 48", PREFILL_ONE, DECODE_TWO, "pack"),
    PairSpec("DCP 2 to one rank", PREFILL_DCP, DECODE_ONE, "scatter"),
    PairSpec("DCP 2 by blocks of 32 to DCP 2 token by token", PREFILL_DCP, DECODE_DCP, "scatter"),
    PairSpec("TP 2 with DCP 2 to TP 2 without, blocks of 32 to blocks of 48", PREFILL_DCP, DECODE_TWO, "scatter"),
    _gqa("two heads on one rank to one on each, blocks of 64 to blocks of 32", GQA_ONE, GQA_SPLIT, "direct"),
    # Told to scatter, but the decode engine is told to write directly and has no memory for that: the next best.
    _gqa("one head on each rank to two on one, blocks of 32 to blocks of 64", GQA_SPLIT, GQA_ONE, "pack"),
    _gqa("two heads on one rank to TP 4 with DCP 2, blocks of 64 to blocks of 32", GQA_ONE, GQA_DCP, "direct"),
    _gqa("one head on each rank to TP 4 with DCP 2", GQA_SPLIT, GQA_DCP, "scatter"),
)


def flow_prompts(flow: str) -> list[str]:
    """Return the prompts of one way through a router, unknown to all engines and with nothing in common."""
    return pair_prompts([_layout(PREFILL_DCP), _layout(DECODE_DCP)], f"flow {flow}")[0][::2]


def expected_answers(pool: EnginePool, plain: EngineSpec, flows: tuple[str, ...] = ()) -> dict[str, tuple[int, ...]]:
    """Return the tokens of an engine without P/D for all prompts of its pairs, and of these flows.

    All at once and before the pairs' engines start: the plain engine makes room for them.
    """
    prompts = [prompt for pair in PAIRS if pair.plain == plain for part in pair.prompts for prompt in part]
    prompts += [prompt for flow in flows for prompt in flow_prompts(flow)]
    wanted = list(dict.fromkeys(prompts))
    return dict(zip(wanted, pool.answers(plain, wanted, max_tokens=MAX_TOKENS, concurrency=8), strict=True))


def _layout(spec: EngineSpec) -> tuple[int, int, int]:
    return spec.block, spec.dcp, spec.interleave if spec.dcp > 1 else spec.block
