"""The placement formula of the engine's test plugin, against dealing tokens out like cards."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

SOURCE = Path(__file__).parents[1] / "engine_plugin" / "src" / "dcp_cpu_engine_plugin" / "shards.py"


def _load() -> ModuleType:
    # By path: the plugin is installed into the engine's environment only, and needs nothing of it for this module.
    spec = importlib.util.spec_from_file_location("engine_plugin_shards", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses looks its module up
    spec.loader.exec_module(module)
    return module


shards = _load()


@given(
    world=st.integers(1, 5),
    interleave=st.integers(1, 6),
    chunks=st.integers(1, 4),
    num_tokens=st.integers(0, 300),
)
def test_tokens_lie_where_dealing_them_out_puts_them(world: int, interleave: int, chunks: int, num_tokens: int) -> None:
    block = interleave * chunks
    dealt: dict[int, tuple[int, int, int]] = {}
    filled = [0] * world
    for token in range(num_tokens):
        shard = token // interleave % world
        dealt[token] = (shard, *divmod(filled[shard], block))
        filled[shard] += 1
    positions = np.arange(num_tokens)
    for index in range(world):
        shard = shards.Shard(world=world, index=index, interleave=interleave, block_size=block)
        held = positions[shard.holds(positions)]
        blocks, rows = shard.block(held).tolist(), shard.row(held).tolist()
        places = {token: (index, b, r) for token, b, r in zip(held.tolist(), blocks, rows, strict=True)}
        assert places == {token: place for token, place in dealt.items() if place[0] == index}


@pytest.mark.parametrize(
    ("value", "world", "played"),
    [
        pytest.param(None, 2, [0, 1], id="without the variable every rank plays its own shard"),
        pytest.param("0", 2, [0, 1], id="0 is off"),
        pytest.param("1", 2, [1, 0], id="two ranks exchange their shards"),
        pytest.param("1", 4, [3, 2, 1, 0], id="four ranks play their mirror images"),
        pytest.param("1", 1, [0], id="one rank has nobody to exchange with"),
    ],
)
def test_ranks_play_their_own_shards_unless_swapped(
    monkeypatch: pytest.MonkeyPatch, value: str | None, world: int, played: list[int]
) -> None:
    if value is None:
        monkeypatch.delenv(shards.SWAP_ENV, raising=False)
    else:
        monkeypatch.setenv(shards.SWAP_ENV, value)
    assert [shards.shard_of_rank(rank, world) for rank in range(world)] == played
