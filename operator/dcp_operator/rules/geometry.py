"""What one role's sizes must satisfy among themselves, as predicates: the formulas behind the rules and suggestions.

T tensor, W decode context, C prefill context, I interleave, B block size; Q attention heads and H KV heads of the
model. Sources: vLLM `config/parallel.py` (sizes), `config/model.py` (heads), `config/vllm.py` (block size); `(T/H) %
W` is ours, because vLLM takes T 12, H 2, W 4 and attends across two heads' caches. `dcp_connector.geometry` holds the
same for the transfer, and a property test holds the two together.
"""

from dcp_operator.api.spec import Geometry


def kv_heads(geometry: Geometry) -> int:
    """Return H: the KV heads that are cached; latent attention keeps one."""
    return 1 if geometry.attention == "mla" else geometry.kv_heads


def tensor_fits_heads(tensor: int, geometry: Geometry) -> bool:
    """Whether heads spread evenly: Q % T == 0, and T % H == 0 if T >= H, else H % T == 0."""
    heads = kv_heads(geometry)
    return geometry.attention_heads % tensor == 0 and (tensor % heads == 0 or heads % tensor == 0)


def context_fits_tensor(context: int, tensor: int) -> bool:
    """Whether T % W == 0 (without prefill context parallelism)."""
    return tensor % context == 0


def context_fits_heads(context: int, tensor: int, geometry: Geometry | None) -> bool:
    """Whether the ranks that shard one sequence hold the same head: T > H, (T/H) % W == 0 and (Q/H) % W == 0."""
    if context == 1 or geometry is None or geometry.attention == "mla":
        return True
    heads = geometry.kv_heads
    return (
        tensor > heads
        and tensor % heads == 0
        and (tensor // heads) % context == 0
        and (geometry.attention_heads // heads) % context == 0
    )


def divisors(number: int) -> list[int]:
    """Return all divisors, ascending."""
    small = [candidate for candidate in range(1, int(number**0.5) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})


def context_choices(tensor: int, geometry: Geometry | None) -> list[int]:
    """Return every decode context size that a tensor size and a model allow, ascending; 1 is always among them."""
    return [context for context in divisors(tensor) if context_fits_heads(context, tensor, geometry)]
