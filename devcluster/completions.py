"""A small client of vLLM's completions endpoint, for the demo, the tests and the benches.

It asks for token ids: comparing text would hide differences.
"""

import http.client
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from devcluster.errors import DevClusterError

__all__ = ["Completion", "CompletionError", "complete", "complete_all", "complete_serially", "get_text"]


class CompletionError(DevClusterError):
    """The endpoint gave something else than a completion; the message holds where, status and words."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One greedy answer."""

    token_ids: tuple[int, ...]
    text: str
    prompt_tokens: int
    kv_transfer_params: Mapping[str, Any] | None


def complete(
    url: str,
    prompt: str | Sequence[int],
    *,
    model: str = "tiny",
    max_tokens: int = 24,
    kv_transfer_params: Mapping[str, Any] | None = None,
    timeout_s: float = 120.0,
) -> Completion:
    """Ask for a greedy completion of exactly `max_tokens` tokens."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if kv_transfer_params is not None:
        body["kv_transfer_params"] = dict(kv_transfer_params)
    answer = json.loads(_request(url, "POST", "/v1/completions", body, timeout_s))
    choice = answer["choices"][0]
    return Completion(
        token_ids=tuple(choice["token_ids"] or ()),
        text=choice["text"],
        prompt_tokens=answer["usage"]["prompt_tokens"],
        kv_transfer_params=answer.get("kv_transfer_params"),
    )


def complete_all(
    url: str,
    prompts: Sequence[str],
    *,
    model: str = "tiny",
    max_tokens: int = 24,
    concurrency: int = 1,
    timeout_s: float = 120.0,
) -> list[Completion]:
    """Ask for every prompt, in order; `concurrency` requests at a time."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(
            pool.map(lambda p: complete(url, p, model=model, max_tokens=max_tokens, timeout_s=timeout_s), prompts)
        )


def complete_serially(
    prefill_url: str, decode_url: str, prompt: str, *, max_tokens: int = 24, timeout_s: float = 120.0
) -> Completion:
    """Do what a router with the serial flow does: ask prefill for one token, hand its parameters to decode."""
    ask = {"do_remote_decode": True, "do_remote_prefill": False}
    prefilled = complete(prefill_url, prompt, max_tokens=1, kv_transfer_params=ask, timeout_s=timeout_s)
    if not prefilled.kv_transfer_params:
        raise CompletionError(f"{prefill_url} answered without kv_transfer_params: does it run a connector?")
    return complete(
        decode_url,
        prompt,
        max_tokens=max_tokens,
        kv_transfer_params=prefilled.kv_transfer_params,
        timeout_s=timeout_s,
    )


def get_text(url: str, path: str, timeout_s: float = 10.0) -> str:
    """Return the body of a GET that answered 200."""
    return _request(url, "GET", path, None, timeout_s)


def _request(url: str, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> str:
    # http.client and not urllib: no proxy of the environment may come between a test and an engine on this machine.
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)
    try:
        headers = {"content-type": "application/json"}
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise CompletionError(f"{method} {url}{path} got no answer: {error or type(error).__name__}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise CompletionError(f"{method} {url}{path} answered {response.status}: {text[:500]}")
    return text
