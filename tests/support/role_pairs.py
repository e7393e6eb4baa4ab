"""Objects with two roles, right and wrong ones, as a hypothesis strategy; sizes are those that users choose among."""

from typing import Any

from hypothesis import strategies as st

from tests.support.specimens import merged, specimen

_KV_HEADS = st.sampled_from([1, 1, 2, 2, 3, 4, 8, 16])
_QUERIES_PER_HEAD = st.sampled_from([1, 2, 3, 4, 6, 7, 8, 12, 16])
_MLA_HEADS = st.sampled_from([8, 12, 16, 20, 32, 64, 128])
_TENSOR = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64])
_BLOCK = st.sampled_from([16, 32, 48, 64, 64, 80, 128, 256])
_ODD_BLOCK = st.sampled_from([1, 8, 20, 24, 33])
_INTERLEAVE = st.sampled_from([3, 5, 12, 24, 48, 96, 128, 512])
_LENGTH = st.sampled_from([1024, 4096, 8192, 16384])
_RARELY = st.integers(0, 24).map(lambda number: number == 24)
IMAGES = {"0.32": "vllm/vllm-openai:v0.32.0", "0.33": "vllm/vllm-openai:v0.33.0"}


def _mostly(draw: st.DrawFn, right: list[int], other: st.SearchStrategy[int]) -> st.SearchStrategy[int]:
    """Return the sizes that suit the rest of the object, now and then the others."""
    return other if draw(st.integers(0, 9)) == 9 else st.sampled_from(right)


def _any_context(tensor: int) -> st.SearchStrategy[int]:
    """Return decode context sizes, half of them such that tensor is a multiple."""
    return st.integers(1, 16) | st.sampled_from([size for size in range(1, tensor + 1) if tensor % size == 0])


@st.composite
def geometries(draw: st.DrawFn) -> dict[str, Any]:
    """Heads of a model, alike with themselves."""
    layers = {"layers": 4} | ({"maxModelLen": 8192} if draw(st.booleans()) else {})
    if draw(st.booleans()):
        return {"attention": "mla", "attentionHeads": draw(_MLA_HEADS), "kvHeads": 1} | layers
    kv_heads = draw(_KV_HEADS)
    return {"attention": "gqa", "attentionHeads": kv_heads * draw(_QUERIES_PER_HEAD), "kvHeads": kv_heads} | layers


@st.composite
def roles(draw: st.DrawFn, geometry: dict[str, Any]) -> dict[str, Any]:
    """One role: mostly with sizes that suit the model, now and then with any."""
    heads, kv_heads = geometry["attentionHeads"], geometry["kvHeads"]
    fitting = [size for size in range(1, 65) if heads % size == 0 and not (kv_heads % size and size % kv_heads)]
    dividing_heads = st.sampled_from([size for size in range(1, 65) if heads % size == 0])
    tensor = draw(_mostly(draw, fitting, _TENSOR | dividing_heads))
    shared = max(tensor // kv_heads, 1)
    groups = [size for size in range(1, shared + 1) if shared % size == 0]
    sizes: dict[str, Any] = {"tensor": tensor, "decodeContext": draw(_mostly(draw, groups, _any_context(tensor)))}
    for field in ("pipeline", "data", "prefillContext"):
        if draw(_RARELY):
            sizes[field] = draw(st.sampled_from([1, 2, 4]))
    if draw(_RARELY):
        sizes["expert"] = True
    block = draw(_ODD_BLOCK) if draw(_RARELY) else draw(_BLOCK)
    role: dict[str, Any] = {"parallelism": sizes, "blockSize": block}
    if draw(st.booleans()):
        dividing = [size for size in (1, 2, 4, 8, 16, 32, 64) if block % size == 0]
        role["kvCacheInterleaveSize"] = draw(_mostly(draw, dividing, _INTERLEAVE))
    if draw(_RARELY):
        role["maxModelLen"] = draw(_LENGTH)
    return role


@st.composite
def pairs(draw: st.DrawFn, connector: str = "mooncake", versions: tuple[str, ...] = tuple(IMAGES)) -> dict[str, Any]:
    """An object with a model and two roles; formats and lengths are mostly the same on both."""
    geometry = draw(geometries())
    prefill, decode = draw(roles(geometry)), draw(roles(geometry))
    if draw(st.booleans()):
        decode["blockSize"] = prefill["blockSize"]
    for field, values in FORMATS.items():
        if draw(st.integers(0, 5)) == 0:
            prefill[field] = decode[field] = draw(st.sampled_from(values))
        if draw(_RARELY):
            decode[field] = draw(st.sampled_from(values))
    return pair_of(geometry, prefill, decode, connector=connector, version=draw(st.sampled_from(versions)))


#: Number formats: those that vLLM lists, other names of the same, and one that it doesn't know.
FORMATS = {
    "dtype": ("auto", "bfloat16", "float16", "half", "float32", "float", "bfloat17"),
    "kvCacheDtype": ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "nvfp4", "fp9"),
}


def pair_of(
    geometry: dict[str, Any],
    prefill: dict[str, Any],
    decode: dict[str, Any],
    *,
    connector: str = "mooncake",
    version: str = "0.33",
) -> dict[str, Any]:
    """Return an object with these roles and nothing else that a rule could object to."""
    body = specimen({"spec": {"image": IMAGES[version], "model": {"uri": "pvc://models/one"}}})
    spec = body["spec"]
    spec["model"]["geometry"] = geometry
    spec["prefill"], spec["decode"] = merged({"replicas": 1}, prefill), merged({"replicas": 1}, decode)
    spec["kvConnector"] = {"type": connector, "protocol": "tcp"}
    if connector == "mooncake-upstream":
        spec["router"] = {"replicas": 0}
    return body
