"""Builders of control messages and events for tests, with every field filled in sensibly."""

from __future__ import annotations

from typing import Any

import numpy as np

from dcp_connector.requests_decode import Load
from dcp_connector.requests_prefill import Hold
from dcp_connector.wire import Cancel, Layout, Page, Pull, Release, token_digest

ENGINE = "prefill-engine"
DECODE = "decode-engine"


def a_pull(pull_id: str = "pull", **fields: Any) -> Pull:
    values: dict[str, Any] = {
        "pull_id": pull_id,
        "transfer_id": "transfer",
        "prefill_engine": ENGINE,
        "prefill_rank": 0,
        "decode_engine": DECODE,
        "decode_rank": 0,
        "budget_s": 60.0,
        "start": 0,
        "end": 3,
        "digest": token_digest(np.arange(3, dtype="<i4").tobytes(), ""),
        "layout": Layout(2, 2, 1, 16, 1),
        "block_table": np.arange(2, dtype="<i8").tobytes(),
        "pages": {"layer": Page(4096, 8, 16, 512, 512, 32, 32)},
        "segment": "127.0.0.1:1",
    }
    return Pull(**{**values, **fields})


def a_hold(transfer_id: str = "transfer", request_id: str = "request", num_tokens: int = 3) -> Hold:
    return Hold(request_id, transfer_id, (0,), num_tokens, np.arange(num_tokens, dtype="<i4").tobytes(), "")


def a_cancel(pull: Pull) -> Cancel:
    return Cancel(pull.pull_id, pull.transfer_id, pull.prefill_engine, pull.prefill_rank)


def a_release(transfer_id: str = "transfer", decode_engine: str = DECODE, prefill_rank: int = 0) -> Release:
    return Release(transfer_id, ENGINE, prefill_rank, decode_engine, "not needed")


def a_load(request_id: str = "request", transfer_id: str = "transfer", **fields: Any) -> Load:
    values: dict[str, Any] = {
        "request_id": request_id,
        "transfer_id": transfer_id,
        "bootstrap_addr": "http://127.0.0.1:1",
        "engine_id": ENGINE,
        "block_ids": (4, 5),
        "start": 0,
        "end": 3,
        "digest": b"",
    }
    return Load(**{**values, **fields})
