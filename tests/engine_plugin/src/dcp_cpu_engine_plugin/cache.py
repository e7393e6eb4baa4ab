"""The paged cache as plain rows.

A layer's cache is one contiguous tensor `[num_blocks, kv_heads, block_size, 2 * head_dim]`. Row r of a head is the key
(head_dim numbers) and then the value (head_dim numbers) of one token, next to each other, so that a token of a head is
`2 * head_dim * itemsize` consecutive bytes and can be moved by a byte copy.
"""

import torch

__all__ = ["read_rows", "write_rows"]


def write_rows(cache: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Store tokens.

    slots: int64 `[num_tokens]`, block * block_size + row; negative where this rank does not keep the token.
    key, value: `[num_tokens, kv_heads, head_dim]`.
    """
    kept = slots >= 0
    block, row = _split(cache, slots[kept])
    cache[block, :, row] = torch.cat((key[kept], value[kept]), dim=-1).to(cache.dtype)


def read_rows(cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key and value of the given slots, float32, `[kv_heads, num_slots, head_dim]` each."""
    block, row = _split(cache, slots)
    rows = cache[block, :, row].float().transpose(0, 1)
    key, value = rows.chunk(2, dim=-1)
    return key, value


def _split(cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    block_size = cache.shape[2]
    return slots // block_size, slots % block_size
