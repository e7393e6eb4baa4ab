"""Our reading of arguments beside vLLM's own parser, in the environment where vLLM is installed."""

import json
import os
import random
import re
import subprocess
from pathlib import Path

import pytest

from dcp_operator.flags import known_flags, read_arguments
from dcp_operator.flags.owned import MODEL, TYPED
from dcp_operator.rules.values import BadValueError, flag_value
from devcluster.engine.environment import ensure_engine_environment
from devcluster.paths import this_cache

SCRIPT = Path(__file__).with_name("vllm_flags.py")
TABLE = Path("operator/dcp_operator/flags/vllm-0.32.json")

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


#: What argparse says of arguments that it can't read. Other refusals are of a value's content, for vLLM to judge:
#: the choices and the JSON of a flag differ between versions.
UNREADABLE = re.compile(
    r"expected (one|at least one) argument|ambiguous option|unrecognized arguments|ignored explicit argument"
    r"|invalid int value|invalid human_readable_int|Decimals are not allowed|IndexError|SystemExit"
)


def abbreviations(count):
    """Return random prefixes of random flags with a value, from a fixed seed."""
    generator = random.Random(20_261_130)
    cases = []
    while len(cases) < count:
        spec = known_flags().by_name[generator.choice(list(known_flags().by_name))]
        name = generator.choice(spec.names)
        if name.startswith("--"):
            name = name[: generator.randint(5, len(name))]
        if generator.random() < 0.3:
            name = "--" + name[2:].replace("-", "_") if name.startswith("--") else name
        number = str(generator.randint(1, 9))
        cases.append([f"{name}={number}"] if generator.random() < 0.5 else [name, number])
    return cases


@pytest.fixture(scope="module")
def cases():
    return [*SPELLINGS, *abbreviations(300)]


@pytest.fixture(scope="module")
def vllm(cases):
    """What the installed vLLM says, from one process: its import takes longer than all readings."""
    environment = os.environ.get("DCP_ENGINE_ENV") or ensure_engine_environment(this_cache().root, print)
    result = subprocess.run(
        [Path(environment) / "bin" / "python3", SCRIPT, "compare"],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


def test_the_table_of_flags_is_that_of_the_installed_version(vllm):
    assert vllm["table"] == TABLE.read_text(), f"write it again: {SCRIPT} table > {TABLE}"


def test_every_spelling_is_read_as_vllm_reads_it(vllm, cases):
    compared = refused = 0
    for arguments, theirs in zip(cases, vllm["readings"], strict=True):
        reading = read_arguments(arguments)
        if "error" in theirs:
            if UNREADABLE.search(theirs["error"]):
                refused += 1
                assert reading.problems or has_bad_value(reading), (arguments, theirs)
            continue
        # vLLM takes a word without a flag for the model's name; ours refuses it, because the operator names the model.
        if "model_tag" in theirs:
            assert reading.problems, arguments
            continue
        assert reading.problems == (), (arguments, theirs)
        for name in theirs:
            assert reading.last(canonical(name)) is not None, (arguments, name)
        for name in (*TYPED, *MODEL):
            flag = reading.last(name)
            if flag is not None and name in theirs:
                assert ours_as_theirs(flag) == theirs[name], (arguments, name)
                compared += 1
    assert compared > 40
    assert refused > 15


def canonical(name):
    return known_flags().by_name[name].canonical


def ours_as_theirs(flag):
    value = flag_value(flag)
    return -1 if value == "auto" and flag.name == "--max-model-len" else value


def has_bad_value(reading):
    for flag in reading.flags:
        try:
            flag_value(flag)
        except BadValueError:
            return True
    return False
