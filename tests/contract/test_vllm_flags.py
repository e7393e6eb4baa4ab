"""Our reading of arguments beside vLLM's own parser, for every supported version."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from dcp_operator.flags import BadValueError, flag_value, known_flags, read_arguments
from tests.support.flag_tables import table_file, table_text
from tests.support.profiles import examples
from tests.support.vllm_lines import command_lines
from tests.support.vllm_process import VERSIONS, vllm_process

#: Spellings of the flags that the operator answers for, and of others around them.
SPELLINGS = [
    ["-tp", "4"],
    ["-tp=4"],
    ["--tensor-parallel-size", "4"],
    ["--tensor_parallel_size", "4"],
    ["--tensor-parallel-size=4"],
    ["--tensor_parallel-size=4"],
    ["--tensor-par", "4"],
    ["--tensor_par=4"],
    ["-tp", "4", "--tensor-parallel-size=8"],
    ["-pp", "2"],
    ["-dp", "2"],
    ["-dpl=2"],
    ["-dcp", "4"],
    ["-dcp=4"],
    ["--decode-context-parallel-size=4"],
    ["--decode-c", "4"],
    ["-pcp", "2"],
    ["-pc", "2"],
    ["-ep"],
    ["--enable-expert-parallel"],
    ["--no-enable-expert-parallel"],
    ["--no_enable_expert_parallel"],
    ["--enable-expert-parallel", "--no-enable-expert-parallel"],
    ["--enable-exp"],
    ["--cp-kv-cache-interleave-size", "16"],
    ["--cp_kv_cache_interleave_size=16"],
    ["--cp-kv", "16"],
    ["--dcp-kv-cache-interleave-size=16"],
    ["--block-size", "32"],
    ["--block_size=32"],
    ["--block", "32"],
    ["--dtype", "bfloat16"],
    ["--dtype=half"],
    ["--kv-cache-dtype", "fp8"],
    ["--max-model-len", "8k"],
    ["--max-model-len=8K"],
    ["--max-model-len=25.6k"],
    ["--max-model-len", "auto"],
    ["--max-model-len", "-1"],
    ["--max_model_len", "8192"],
    ["--model", "a/b"],
    ["--model=a.b/c_d"],
    ["--revision", "main"],
    ["--served-model-name", "a", "b"],
    ["--served-model-name=a"],
    ["--served_model_name", "a", "--port", "8001"],
    ["--trust-remote-code"],
    ["--tokenizer=x"],
    ["-q", "awq"],
    ["-qawq"],
    ["-n8"],
    ["-n=8"],
    ["-O3"],
    ["-O=2"],
    ["-O", "1"],
    ["--port=8001"],
    ["--host", "::"],
    ["--kv-transfer-config", '{"kv_connector": "X", "kv_role": "kv_both"}'],
    ["--kv_transfer_config.kv_role", "kv_both", "--kv-transfer-config.kv_connector=X"],
    ["--kv-tr.kv_role=kv_both", "--kv-tr.kv_connector", "X"],
    ["--kv-transfer-config.kv_connector_extra_config.a.b", "1", "--kv-transfer-config.kv_connector", "X"],
    ["--seed", "-1"],
    ["--uvicorn-log-level", "info", "--enforce-eager", "--max-num-seqs=64"],
    ["--max-num-batched-tokens", "16k"],
    ["--disable-expert-parallel"],
    ["--enable-expert-parallel", "--disable-expert-parallel"],
    ["--no-disable-uvicorn-access-log"],
    ["--hf-overrides.a.b=80k", "--hf-overrides.a.c+=1,2", "--hf-overrides.a.c+=3", "--hf-overrides.d=x"],
    ["--max-model-len=1.001k"],
    ["-asc", "4"],
    ["-pc=2"],
    # What vLLM refuses.
    ["-tp8"],
    ["-tp", "eight"],
    ["-tp", "1.5"],
    ["-tp"],
    ["--block-size"],
    ["--block-size", "--port", "8001"],
    ["-d", "3"],
    ["--max-num", "3"],
    ["--blok-size", "3"],
    ["--enforce-eager=true"],
    ["--enforce-eager", "true", "again"],
    ["--max-num-seqs 64", "word"],
    ["--kv-transfer-config.kv_role"],
    ["--max-model-len", "2.5K"],
    ["--help"],
    ["-h"],
]

#: What vLLM says of values whose content it judges and we don't: fields of configuration objects, adapters, and the one
#: flag whose choices depend on the machine.
CONTENT = re.compile(r"validation errors? for|for --lora-modules|--mm-processor-device: invalid choice")
#: Flags whose uses vLLM gathers, or turns into objects.
GATHERED = ("--middleware", "--lora-modules", "--device-ids")
#: An abbreviated short form with =, which the engine environment's Python (3.11) does not take yet; vLLM's images run a
#: later one.
ABBREVIATED_SHORT = re.compile(r"^-[a-z]+=")


@pytest.fixture(scope="module", params=VERSIONS)
def vllm(request):
    return vllm_process(request.param)


def test_the_table_of_flags_is_that_of_the_parser(vllm):
    assert table_text(vllm.ask("table")) == table_file(vllm.version).read_text(), "python -m tests.support.flag_tables"


@pytest.mark.parametrize("arguments", SPELLINGS, ids=" ".join)
def test_reads_as_vllm_reads(vllm, arguments):
    compare(vllm, arguments)


@pytest.mark.timeout(1800)  # many examples, on a machine that may be doing other things
@settings(max_examples=examples(dev=300, ci=2500), suppress_health_check=[HealthCheck.too_slow])
@given(command_lines())
def test_every_command_line_is_read_as_vllm_reads_it(vllm, arguments):
    compare(vllm, arguments)


def compare(vllm, arguments):
    """Hold our reading of a command line against that of vLLM."""
    known = known_flags(vllm.version)
    reading = read_arguments(arguments, known)
    if "--" in arguments:  # ours refuses it: what follows would be no flags, and vLLM's Python decides what they are
        assert reading.problems
        return
    [theirs] = vllm.ask("read", cases=[arguments])
    if "error" in theirs:
        error = theirs["error"]
        assert (
            reading.problems
            or has_bad_value(reading)
            or CONTENT.search(error)
            or any(ABBREVIATED_SHORT.match(argument) and argument in error for argument in arguments)
        ), error
        return
    values = theirs["values"]
    # vLLM takes a word without a flag for the model's name; ours refuses it, because the operator names the model.
    if "model_tag" in values:
        assert reading.problems
        return
    assert reading.problems == (), values
    for flag in reading.flags:
        flag_value(flag)
    said = {flag.name: plain(flag) for flag in reading.flags}
    for name, value in values.items():
        spec = known.by_name[name]
        assert spec.canonical in said, name
        found = said.pop(spec.canonical)
        if spec.kind in ("bool", "int", "float", "size", "size-or-auto", "str", "name") and name not in GATHERED:
            assert found == as_plain(value), name
        elif spec.kind in ("json", "json-or-text") and isinstance(value, dict):
            assert json.loads(found) == value, name
    for name, value in said.items():
        spec = known.by_name[name]
        # What vLLM does not mention is at its default; defaults that are no plain values are not in the table.
        assert spec.default is None or value == as_plain(spec.default), name


def plain(flag):
    """Return the value of a flag in the words in which vLLM's is compared."""
    if flag.spec.arity in ("+", "*"):
        return [as_plain(flag_value(replaced(flag, value))) for value in flag.values]
    if not flag.values and flag.kind != "bool":
        return "True"  # a flag with an optional value, without it
    return as_plain(flag_value(flag))


def replaced(flag, value):
    return replace(flag, values=(value,))


def as_plain(value):
    """Numbers and texts as texts: which of them a text stands for is the same on both sides."""
    if isinstance(value, list):
        return [as_plain(each) for each in value]
    if value is None or value == "":
        return "None"
    if value == -1:
        return "auto"
    return str(value)


def has_bad_value(reading):
    for flag in reading.flags:
        try:
            flag_value(flag)
        except BadValueError:
            return True
    return False
