"""A prompt of 32k tokens, dealt out token by token, over TCP through the real TransferEngine: every byte is right.

Written one descriptor per token and layer, this is far more than a TCP session of Mooncake takes at once: 3,000 in one
batch fail, and 4,000 wedge the session for good. Bytes only: attention over so many tokens takes too long on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kv_oracle import Sizes
from tests.support.transfer_pair import ENTRY_BYTES, NUM_LAYERS, Host, Pair, hosts, opened

TOKENS = 32_768 - 5  # the last block is not full
ONE = Sizes(1, 1, 16, 16, 1)
TOKEN_BY_TOKEN = Sizes(2, 2, 1, 16, 1)
TOKEN_BY_TOKEN_REPLICATED = Sizes(4, 2, 1, 16, 1)
BY_FOUR = Sizes(2, 2, 4, 16, 1)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    with hosts(tmp_path_factory.mktemp("long")) as started:
        yield started


@pytest.mark.parametrize(
    ("prefill", "decode", "path"),
    [
        pytest.param(ONE, TOKEN_BY_TOKEN, "direct", id="one descriptor per token"),
        pytest.param(ONE, TOKEN_BY_TOKEN, "auto", id="the path that is chosen"),
        pytest.param(BY_FOUR, TOKEN_BY_TOKEN, "direct", id="one descriptor per token, from two prefill ranks"),
        pytest.param(BY_FOUR, TOKEN_BY_TOKEN_REPLICATED, "auto", id="from two prefill ranks to four, as chosen"),
    ],
)
def test_every_byte_of_a_long_prompt_arrives(both: tuple[Host, Host], prefill: Sizes, decode: Sizes, path: str) -> None:
    pair = Pair(prefill, decode, config={"path": path}, num_blocks=TOKENS // 16 + 8)
    with opened(both, pair) as transfers:
        transfers.hold("long", TOKENS)
        result = transfers.load("long", 0, TOKENS)
        assert result["received"] == [None] * decode.t
        assert result["different"] == [0] * decode.t
        assert result["stats"]["bytes_received"] == TOKENS * ENTRY_BYTES * NUM_LAYERS * decode.t // decode.w
        # The session is as good as new.
        transfers.hold("after", 33)
        assert transfers.load("after", 0, 33)["received"] == [None] * decode.t
