"""What routers write into a request, read exactly."""

from __future__ import annotations

import pytest

from dcp_connector.errors import ParamsError
from dcp_connector.params import Fetch, HandOff, Plain, answer, parse

NULLS = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
FETCH = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_bootstrap_addr": "http://10.0.0.1:8998",
    "remote_engine_id": "engine",
    "transfer_id": "xfer-1",
}


@pytest.mark.parametrize(
    ("params", "part"),
    [
        (None, Plain()),
        ({}, Plain()),
        ({"do_remote_decode": False, "do_remote_prefill": False}, Plain()),
        ({"do_remote_decode": None, "unknown": [1, 2]}, Plain()),
        ({"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "x"}, HandOff("x")),
        ({"do_remote_decode": True, "do_remote_prefill": False, **NULLS}, HandOff(None)),
        (FETCH, Fetch("xfer-1", "http://10.0.0.1:8998", "engine", None)),
        ({**FETCH, "remote_num_tokens": 7}, Fetch("xfer-1", "http://10.0.0.1:8998", "engine", 7)),
        ({**FETCH, "remote_engine_id": None}, Fetch("xfer-1", "http://10.0.0.1:8998", None, None)),
        (
            {**FETCH, "remote_bootstrap_addr": "http://[fd00::1]:8998/"},
            Fetch("xfer-1", "http://[fd00::1]:8998", "engine", None),
        ),
    ],
)
def test_what_existing_routers_send_is_understood(params: object, part: object) -> None:
    assert parse(params) == part


def test_prefills_answer_is_what_decode_understands() -> None:
    fields = ("xfer-1", "http://10.0.0.1:8998", "engine", 7)
    assert parse(answer(*fields)) == Fetch(*fields)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ("text", "kv_transfer_params is 'text', expected an object"),
        ({"do_remote_prefill": 1}, "do_remote_prefill is 1, expected true or false"),
        ({"do_remote_prefill": True, "do_remote_decode": True}, "both do_remote_decode and do_remote_prefill"),
        ({"do_remote_decode": True, "transfer_id": 7}, "transfer_id is 7, expected a printable string"),
        ({"do_remote_decode": True, "transfer_id": ""}, "transfer_id is '', expected"),
        ({"do_remote_decode": True, "transfer_id": "a\nb"}, "expected a printable string"),
        ({"do_remote_decode": True, "transfer_id": "x" * 513}, "of 1 to 512 characters"),
        ({**FETCH, "transfer_id": None}, "no transfer_id"),
        ({**FETCH, "remote_bootstrap_addr": None}, "no remote_bootstrap_addr"),
        ({**FETCH, "remote_num_tokens": 0}, "remote_num_tokens is 0, expected a positive integer"),
        ({**FETCH, "remote_num_tokens": True}, "remote_num_tokens is True"),
        ({**FETCH, "remote_num_tokens": 2**40}, "expected a positive integer"),
        *(
            ({**FETCH, "remote_bootstrap_addr": address}, "expected http://HOST:PORT")
            for address in (
                "10.0.0.1:8998",
                "https://10.0.0.1:8998",
                "http://10.0.0.1",
                "http://10.0.0.1:99999",
                "http://user@10.0.0.1:8998",
                "http://10.0.0.1:8998/path",
                "http://10.0.0.1:8998?x=1",
                "file:///etc/passwd",
                "http://[::1:8998",
            )
        ),
    ],
)
def test_nonsense_is_refused_with_what_was_found_and_what_was_expected(params: object, words: str) -> None:
    with pytest.raises(ParamsError) as error:
        parse(params)
    assert words in str(error.value)
