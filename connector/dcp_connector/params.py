"""What a router wrote into a request's `kv_transfer_params`: decide which part this engine plays in it.

Accepted are the keys that existing routers send (vLLM's example proxy, llm-d's sidecar, vllm-router), unchanged:

    prefill, concurrent:  do_remote_decode=true, do_remote_prefill=false, transfer_id
    prefill, serial:      do_remote_decode=true and nulls; this side mints the transfer id
    decode:               do_remote_prefill=true, do_remote_decode=false, remote_bootstrap_addr, transfer_id,
                          remote_engine_id and, in the serial flow, remote_num_tokens

Unknown keys are ignored: routers add their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from dcp_connector.errors import ParamsError

#: Longest transfer id, engine id or address that is looked at.
MAX_TEXT = 512


@dataclass(frozen=True, slots=True)
class Plain:
    """The request is not part of a transfer."""


@dataclass(frozen=True, slots=True)
class HandOff:
    """Prefill: compute the prompt and keep its KV for a decode engine. `transfer_id` is None when we are to mint it."""

    transfer_id: str | None


@dataclass(frozen=True, slots=True)
class Fetch:
    """Decode: the prompt's KV is to come from the prefill engine behind `bootstrap_addr` ("http://HOST:PORT")."""

    transfer_id: str
    bootstrap_addr: str
    engine_id: str | None
    num_tokens: int | None


def parse(params: object) -> Plain | HandOff | Fetch:
    """Return this engine's part in the transfer. Raises ParamsError: the key, what it holds, what is expected."""
    if params is None:
        return Plain()
    if not isinstance(params, Mapping):
        raise ParamsError(f"kv_transfer_params is {_shown(params)}, expected an object")
    given = cast("Mapping[str, Any]", params)
    decode, prefill = _flag(given, "do_remote_decode"), _flag(given, "do_remote_prefill")
    if decode and prefill:
        raise ParamsError("kv_transfer_params sets both do_remote_decode and do_remote_prefill, expected at most one")
    if decode:
        return HandOff(_text(given, "transfer_id"))
    if not prefill:
        return Plain()
    transfer_id, address = _text(given, "transfer_id"), _text(given, "remote_bootstrap_addr")
    if transfer_id is None:
        raise ParamsError("kv_transfer_params has do_remote_prefill but no transfer_id")
    if address is None:
        raise ParamsError("kv_transfer_params has do_remote_prefill but no remote_bootstrap_addr")
    return Fetch(
        transfer_id, _http_origin(address), _text(given, "remote_engine_id"), _count(given, "remote_num_tokens")
    )


def answer(transfer_id: str, bootstrap_addr: str, engine_id: str, num_tokens: int) -> dict[str, Any]:
    """Return what prefill puts into its response: all that decode needs, to be forwarded verbatim (serial flow)."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_bootstrap_addr": bootstrap_addr,
        "remote_engine_id": engine_id,
        "remote_num_tokens": num_tokens,
    }


def _flag(params: Mapping[str, Any], key: str) -> bool:
    value = params.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ParamsError(f"kv_transfer_params.{key} is {_shown(value)}, expected true or false")
    return value


def _text(params: Mapping[str, Any], key: str) -> str | None:
    value = params.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT or not value.isprintable():
        raise ParamsError(
            f"kv_transfer_params.{key} is {_shown(value)}, expected a printable string of 1 to {MAX_TEXT} characters"
        )
    return value


def _count(params: Mapping[str, Any], key: str) -> int | None:
    value = params.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise ParamsError(f"kv_transfer_params.{key} is {_shown(value)}, expected a positive integer")
    return value


def _http_origin(address: str) -> str:
    """Return "http://HOST:PORT" of `address`, refusing everything that isn't exactly an origin."""
    problem = f"kv_transfer_params.remote_bootstrap_addr is {_shown(address)}, expected http://HOST:PORT"
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ParamsError(problem) from error
    extra = parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc
    if parts.scheme != "http" or not host or port is None or extra:
        raise ParamsError(problem)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
