"""Six invalid objects, one per rule family, at the API server of the whole line: refused, in these words.

What only needs the object's own numbers is refused by the definition's CEL rules already, the rest by the webhook.
"""

import copy
from typing import Any

import pytest
import yaml

from tests.support.line import Line

_VALID = yaml.safe_load("""
apiVersion: dcpdisagg.io/v1alpha1
kind: DCPDisaggDeployment
metadata: {name: refused}
spec:
  model:
    uri: hf://example/model
    geometry: {attention: gqa, attentionHeads: 32, kvHeads: 2, layers: 4, maxModelLen: 4096}
  image: vllm/vllm-openai:v0.33.0
  kvConnector: {protocol: tcp}
  prefill: {parallelism: {tensor: 2}}
  decode: {parallelism: {tensor: 8, decodeContext: 4}}
""")


def _with(**fields: Any) -> dict[str, Any]:
    """Return the valid object with some fields of its spec changed; `__` separates levels."""
    manifest = copy.deepcopy(_VALID)
    for path, value in fields.items():
        *parents, last = path.split("__")
        level = manifest["spec"]
        for parent in parents:
            level = level.setdefault(parent, {})
        level[last] = value
    return manifest


FOUR_GPUS = {"spec": {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": 4}}}]}}

REFUSED = {
    "sizes of one role": (
        _with(decode__parallelism__decodeContext=3),
        (
            "spec.decode.parallelism.decodeContext: 3 does not divide spec.decode.parallelism.tensor 8;"
            " nearest that work: 2, 4 [dcp-divides-tp]"
        ),
    ),
    "heads of the model": (
        _with(decode__parallelism={"tensor": 12, "decodeContext": 4}, model__geometry__attentionHeads=24),
        (
            "spec.decode.parallelism.decodeContext: 4 with spec.decode.parallelism.tensor 12 "
            "and spec.model.geometry.kvHeads 2:"
            " 6 ranks share a KV head, and decodeContext must divide that number;"
            " nearest that work: 3, 6 here, or 8 or 24 in spec.decode.parallelism.tensor [gqa-dcp-replicas]"
        ),
    ),
    "blocks": (
        _with(decode__kvCacheInterleaveSize=48),
        (
            "spec.decode.kvCacheInterleaveSize: 48 does not divide spec.decode.blockSize 64;"
            " nearest that work: 32, 64 [interleave-divides-block]"
        ),
    ),
    "prefill against decode": (
        _with(prefill__maxModelLen=4096, decode__maxModelLen=2048),
        (
            "spec.decode.maxModelLen: 2048 is below spec.prefill.maxModelLen 4096, and decode must take every prompt"
            " that prefill takes; nearest that work: 4096 here, or 2048 in spec.prefill.maxModelLen [max-model-len]"
        ),
    ),
    "arguments of the engine": (
        _with(decode__extraArgs=["-tp=4"]),
        (
            "spec.decode.extraArgs[0]: -tp (--tensor-parallel-size) says 4, but spec.decode.parallelism.tensor is 8;"
            " remove the argument, or set the field to 4 [extra-args-contradict]"
        ),
    ),
    "pods": (
        _with(decode__template=FOUR_GPUS),
        (
            "spec.decode.template.spec.containers[0].resources.limits[nvidia.com/gpu]: 4 differs from the 8 that"
            " spec.decode.parallelism.tensor 8 needs; nearest that works: 8, or leave it out [gpu-count]"
        ),
    ),
}


@pytest.mark.parametrize("family", REFUSED)
def test_an_invalid_object_is_refused_in_words(line: Line, family: str) -> None:
    manifest, words = REFUSED[family]
    assert words in line.refusal(manifest)
    assert line.kubectl("get", "dcpd,deployment,pod", "-o", "name") == ""


def test_the_object_that_the_six_were_made_from_is_taken(line: Line) -> None:
    line.apply_dry(_VALID)
