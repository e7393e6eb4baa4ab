"""A minimal client of an OpenAI-compatible completions endpoint, for the demo, the tests and the benches."""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass

from devcluster.errors import DevClusterError


@dataclass(frozen=True, slots=True)
class Completion:
    """One greedy answer."""

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int


def complete(base_url: str, model: str, prompt: str, *, max_tokens: int = 16, timeout_s: float = 120.0) -> Completion:
    """Ask for one greedy completion and return its tokens.

    `return_token_ids` is vLLM's extension of the API: comparing tokens is stricter than comparing text.
    Raises DevClusterError that names the endpoint and what it answered.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    url = f"{base_url}/v1/completions"
    request = urllib.request.Request(  # noqa: S310 - the URL is built by the caller from a Service's address
        url, data=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:  # noqa: S310 - as above
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        raise DevClusterError(f"{url} answered {error.code}: {error.read(500).decode(errors='replace')}") from error
    except (OSError, ValueError) as error:
        raise DevClusterError(f"{url} gave no completion: {error}") from error
    choice = answer["choices"][0]
    return Completion(prompt, choice["text"], tuple(choice["token_ids"]), answer["usage"]["prompt_tokens"])
