"""Attention over a part of a request's tokens, and the exact merge of such parts.

For a query q the softmax over all keys splits over any partition of the keys. With s_j = scale * q.k_j, part p gives

    lse_p = log sum_{j in p} exp(s_j)          out_p = sum_{j in p} exp(s_j - lse_p) v_j

and the whole is `lse = log sum_p exp(lse_p)`, `out = sum_p exp(lse_p - lse) out_p`. A part that sees no key has
lse_p = -inf and out_p = 0, and so adds nothing.
"""

import torch

__all__ = ["attend", "merge"]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend over one part of the keys.

    query: `[num_queries, heads, head_dim]`; key, value: `[kv_heads, num_keys, head_dim]`; visible: bool
    `[num_queries, num_keys]`. Query heads `g * i ... g * (i + 1) - 1` share KV head i, g = heads / kv_heads.
    Returns out `[num_queries, heads, head_dim]` and lse `[num_queries, heads]`, float32.
    """
    num_queries, heads, head_dim = query.shape
    kv_heads, num_keys, _ = key.shape
    group = heads // kv_heads
    # One matrix product per KV head: the queries of all heads that share it are its rows, head by head.
    rows = query.float().reshape(num_queries, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    scores = torch.matmul(rows.reshape(kv_heads, group * num_queries, head_dim), key.transpose(1, 2)) * scale
    scores = scores.view(kv_heads, group, num_queries, num_keys).masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(0.0)  # -inf minus -inf: a query that sees no key here
    out = torch.matmul(weights.view(kv_heads, group * num_queries, num_keys), value)
    out = out.view(heads, num_queries, head_dim).transpose(0, 1)
    return out, lse.view(heads, num_queries).transpose(0, 1)


def merge(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """Merge the parts: outs `[parts, num_queries, heads, head_dim]`, lses `[parts, num_queries, heads]`.

    Returns `[num_queries, heads, head_dim]`.
    """
    weights = torch.exp(lses - torch.logsumexp(lses, dim=0)).nan_to_num(0.0)
    return (outs * weights.unsqueeze(-1)).sum(dim=0)
