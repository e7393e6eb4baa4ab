"""The engines of docs/how-to/connector-without-operator.md, read by vLLM's own parser."""

import json

import pytest

from tests.support.plain_engines import served_arguments, served_engines
from tests.support.vllm_process import VERSIONS, vllm_process


@pytest.mark.parametrize("version", VERSIONS)
def test_vllm_takes_the_arguments_of_the_page_as_they_are_meant(version):
    answers = vllm_process(version).ask("read", cases=served_arguments())
    prefill, decode = (answer.get("values", answer) for answer in answers)
    assert "error" not in prefill | decode
    meant = served_engines()[1]
    for flag in ("--tensor-parallel-size", "--decode-context-parallel-size", "--cp-kv-cache-interleave-size"):
        assert decode[flag] == int(meant[flag])
    for reading, role in ((prefill, "kv_producer"), (decode, "kv_consumer")):
        said = reading["--kv-transfer-config"]
        text = said if isinstance(said, str) else json.dumps(said)
        assert "DCPMooncakeConnector" in text
        assert role in text
