"""How many tokens of KV cache an engine holds: vLLM's own sizing, for models whose layers all keep every token.

With T tensor ranks, W decode context, block size B, L layers, H KV heads of D elements (latent attention: one head of
kvLoraRank + qkRopeHeadDim elements, key and value in one), and e bytes per element, one rank keeps

    bytes per token  = L * ceil(H / T) * 2 * D * e          (latent: L * (kvLoraRank + qkRopeHeadDim) * e)
    bytes per block  = B * bytes per token                  (vLLM: page_size_bytes, summed over the layers)
    blocks           = available // bytes per block         (vLLM: get_kv_cache_config_from_groups)
    tokens held      = blocks * B * W                       (a block of a rank holds B of its own tokens, and W ranks
                                                            keep different tokens of the same sequence)
    blocks/request   = ceil(ceil(length / W) / B)           (vLLM: max_memory_usage_bytes)

A contract test holds these to vLLM's functions.
"""

from dataclasses import dataclass

from dcp_operator.catalogue import ModelFacts

#: Bytes of one element, by the words of --kv-cache-dtype.
ELEMENT_BYTES: dict[str, int] = {"auto": 2, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True, slots=True)
class KvSize:
    """What one rank of an engine keeps, and what the engine holds with a given memory per rank."""

    bytes_per_token: int
    block_size: int
    decode_context: int
    available_bytes: int

    @property
    def blocks(self) -> int:
        """Blocks that fit into the memory of one rank."""
        return max(0, self.available_bytes) // (self.bytes_per_token * self.block_size)

    @property
    def tokens(self) -> int:
        """Tokens of KV cache that the engine holds, of all sequences together."""
        return self.blocks * self.block_size * self.decode_context

    def blocks_for(self, length: int) -> int:
        """Blocks of each rank that a sequence of `length` tokens takes."""
        return _ceil(_ceil(length, self.decode_context), self.block_size)

    def requests(self, length: int) -> float:
        """How many sequences of `length` tokens fit at once (vLLM's maximum concurrency)."""
        return self.blocks / self.blocks_for(length)


def bytes_per_token(facts: ModelFacts, tensor: int, element_bytes: int) -> int:
    """Return the bytes that one rank keeps of one of its tokens, all layers together.

    Raises ValueError for a model with layers that don't keep every token alike.
    """
    if facts.layout != "full":
        raise ValueError(f"its layers are {facts.layout}, and their KV cache isn't reckoned here")
    if facts.attention == "mla":
        elements = (facts.kv_lora_rank or 0) + (facts.qk_rope_head_dim or 0)
    else:
        elements = _ceil(facts.kv_heads, tensor) * 2 * (facts.head_size or 0)
    return facts.layers * elements * element_bytes


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
