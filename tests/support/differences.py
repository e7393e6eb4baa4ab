"""Where the rules and what runs differ on purpose: two lists, each entry with its reason and an example.

`tests/differential` fails for a difference that is in neither list, and for an entry whose example shows none.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tests.support.role_pairs import pair_of
from tests.support.verdicts import Verdicts


@dataclass(frozen=True)
class Taken:
    """Something that the rules take although an engine refuses it: admission can't know it."""

    #: Found in "stage: words" of the engine's refusal.
    says: str
    why: str
    example: dict[str, Any]


@dataclass(frozen=True)
class Refused:
    """Something that the rules refuse although the engines and the connector take it: a decision of this project."""

    rule: str
    #: Found in the finding's text.
    says: str
    why: str
    example: dict[str, Any]


#: Fields of a role; all others that an example states are parallel sizes.
_ROLE_FIELDS = ("blockSize", "kvCacheInterleaveSize", "maxModelLen", "dtype", "kvCacheDtype")
GQA = {"attention": "gqa", "attentionHeads": 32, "kvHeads": 4, "layers": 4}
MLA = {"attention": "mla", "attentionHeads": 16, "kvHeads": 1, "layers": 4}


def sides(
    prefill: dict[str, Any], decode: dict[str, Any], geometry: dict[str, Any] = GQA, **more: str
) -> dict[str, Any]:
    """Return an object whose roles have tensor 4 and what is stated here."""

    def side(stated: dict[str, Any]) -> dict[str, Any]:
        fields = {key: value for key, value in stated.items() if key in _ROLE_FIELDS}
        own = {key: value for key, value in stated.items() if key not in _ROLE_FIELDS}
        return {"parallelism": {"tensor": 4} | own, **fields}

    return pair_of(geometry, side(prefill), side(decode), **more)


#: Taken with every connector.
TAKEN = {
    "expert parallelism of a model without experts": Taken(
        r"Number of experts in the model must be greater than 0",
        "an object's geometry doesn't say how many experts a model has",
        sides({"expert": True}, {}),
    ),
    "a number format that no attention kernel of the GPU reads": Taken(
        r"^backend: ValueError: formats:",
        "which formats the kernels read depends on the GPU and on packages in the image, such as FlashInfer",
        sides({"dtype": "float32"}, {"dtype": "float32"}, MLA),
    ),
    "a KV-cache format that only a plugin could know": Taken(
        r"^config: ValidationError.*Invalid kv_cache_dtype",
        "since 0.33 platform plugins add formats, and an object doesn't say which plugins its image has",
        sides({"kvCacheDtype": "fp9"}, {"kvCacheDtype": "fp9"}),
    ),
    "a KV cache of 16 bits of a model whose own format is unknown": Taken(
        r'kv_cache_dtype="\w+" is incompatible with dtype',
        "dtype auto stands for what the model's config.json says, which admission doesn't read",
        sides({"kvCacheDtype": "float16"}, {"kvCacheDtype": "float16"}),
    ),
}

#: Refused with every connector.
REFUSED = {
    "an interleave that would be wrong with DCP": Refused(
        "interleave-divides-block",
        r"does not divide",
        "it does nothing while decodeContext is 1, and would end the engine as soon as that is raised",
        sides({"kvCacheInterleaveSize": 48}, {}),
    ),
    "decode that takes shorter prompts than prefill": Refused(
        "max-model-len",
        r"is below",
        "both engines start, but decode refuses prompts that prefill has computed",
        sides({"maxModelLen": 8192}, {"maxModelLen": 4096}),
    ),
    "two names that may mean one KV-cache format": Refused(
        "kv-dtype-equal",
        r"differs from",
        "auto means the model's own format, which admission doesn't know to be the other one",
        sides({"kvCacheDtype": "auto"}, {"kvCacheDtype": "bfloat16"}),
    ),
    "two names that may mean one format of computation": Refused(
        "dtype-equal",
        r"differs from",
        "auto means the model's own format, which admission doesn't know to be the other one",
        sides({}, {"dtype": "bfloat16"}),
    ),
    "a KV cache in another format of 16 bits": Refused(
        "number-format-known",
        r"16 bits",
        "vLLM 0.32 starts with it, 0.33 has learnt to refuse it",
        sides(
            {"dtype": "bfloat16", "kvCacheDtype": "float16"},
            {"dtype": "bfloat16", "kvCacheDtype": "float16"},
            MLA,
            version="0.32",
        ),
    ),
}


def compare(said: Verdicts, refused: Iterable[Refused]) -> None:
    """Fail where the rules and what runs differ, and no list has a reason for it."""
    if not said.rules:
        unexplained = [
            words
            for words in said.engines.values()
            if not any(re.search(each.says, words, re.DOTALL) for each in TAKEN.values())
        ]
        assert not unexplained, "the rules take what an engine refuses"
        assert not said.connector, "the rules take what the connector refuses"
    elif not said.refused_at_run_time:
        for message in said.messages:
            assert any(f"[{each.rule}]" in message and re.search(each.says, message) for each in refused), (
                "the rules refuse what both engines and the connector take"
            )
