"""Rules on extraArgs: every spelling that vLLM takes, and complete messages."""

import pytest

from dcp_operator.flags import known_flags
from dcp_operator.flags.owned import DEPRECATED_INTERLEAVE, MODEL, OWNED, SAME_MODEL, SAME_NUMBERS, TYPED
from tests.support.specimens import report, role, violations


def decode_args(*arguments):
    return role("decode", extraArgs=list(arguments))


REFUSED = {
    "a short form": (
        ["-tp", "4"],
        (
            "spec.decode.extraArgs[0]: -tp (--tensor-parallel-size) says 4, but "
            "spec.decode.parallelism.tensor is 8; remove the argument, or set the field to 4 [extra-args-contradict]"
        ),
    ),
    "a short form with =": (
        ["--seed=1", "-dcp=4"],
        (
            "spec.decode.extraArgs[1]: -dcp (--decode-context-parallel-size) says 4, but "
            "spec.decode.parallelism.decodeContext is 2; remove the argument, or set the field to 4 "
            "[extra-args-contradict]"
        ),
    ),
    "underscores": (
        ["--block_size=32"],
        (
            "spec.decode.extraArgs[0]: --block_size says 32, but spec.decode.blockSize is 64; remove the argument, "
            "or set "
            "the field to 32 [extra-args-contradict]"
        ),
    ),
    "an abbreviation": (
        ["--pipeline", "2"],
        (
            "spec.decode.extraArgs[0]: --pipeline (--pipeline-parallel-size) says 2, but "
            "spec.decode.parallelism.pipeline is "
            "1; remove the argument, or set the field to 2 [extra-args-contradict]"
        ),
    ),
    "the last of repeated flags": (
        ["-tp", "8", "--tensor-parallel-size", "2"],
        (
            "spec.decode.extraArgs[2]: --tensor-parallel-size says 2, but spec.decode.parallelism.tensor is 8; "
            "remove the "
            "argument, or set the field to 2 [extra-args-contradict]"
        ),
    ),
    "a switch": (
        ["-ep"],
        (
            "spec.decode.extraArgs[0]: -ep (--enable-expert-parallel) says true, but spec.decode.parallelism.expert is "
            "false; remove the argument, or set the field to true [extra-args-contradict]"
        ),
    ),
    "a value that another field gives": (
        ["--cp-kv-cache-interleave-size", "16"],
        (
            "spec.decode.extraArgs[0]: --cp-kv-cache-interleave-size says 16, but spec.decode.kvCacheInterleaveSize "
            "is 64 "
            "(from spec.decode.blockSize); remove the argument, or set the field to 16 [extra-args-contradict]"
        ),
    ),
    "a length with a unit": (
        ["--max-model-len", "16k"],
        (
            "spec.decode.extraArgs[0]: --max-model-len says 16000, but spec.decode.maxModelLen is 32768 (from "
            "spec.model.geometry.maxModelLen); remove the argument, or set the field to 16000 [extra-args-contradict]"
        ),
    ),
    "a served name": (
        ["--served-model-name", "gpt"],
        (
            'spec.decode.extraArgs[0]: --served-model-name says "gpt", but spec.model.servedName is "chat"; remove the '
            'argument, or set the field to "gpt" [extra-args-contradict]'
        ),
    ),
    "KV transfer as JSON": (
        ["--kv-transfer-config", '{"kv_role": "kv_both"}'],
        (
            "spec.decode.extraArgs[0]: --kv-transfer-config belongs to the operator, because the operator connects "
            "prefill "
            "with decode, from spec.kvConnector; remove it [connector-args]"
        ),
    ),
    "KV transfer as a dotted key": (
        ["--kv_transfer_config.kv_role", "kv_both"],
        (
            "spec.decode.extraArgs[0]: --kv_transfer_config.kv_role belongs to the operator, because the operator "
            "connects "
            "prefill with decode, from spec.kvConnector; remove it [connector-args]"
        ),
    ),
    "KV transfer abbreviated and dotted": (
        ["--kv-tr.kv_role=kv_both"],
        (
            "spec.decode.extraArgs[0]: --kv-tr.kv_role (--kv-transfer-config) belongs to the operator, "
            "because the operator connects prefill with decode, from spec.kvConnector; remove it [connector-args]"
        ),
    ),
    "a port": (
        ["--port=8000"],
        (
            "spec.decode.extraArgs[0]: --port belongs to the operator, because the probes, the router and the "
            "connector "
            "reach the engine at the address that the operator gives it; remove it [connector-args]"
        ),
    ),
    "a file of arguments": (
        ["--config", "/etc/vllm.yaml"],
        (
            "spec.decode.extraArgs[0]: --config belongs to the operator, because vLLM reads the file when it starts, "
            "and admission can't see it; "
            "state its arguments in extraArgs; remove it [connector-args]"
        ),
    ),
    "the deprecated interleave": (
        ["--dcp-kv-cache-interleave-size", "8"],
        (
            "spec.decode.extraArgs[0]: --dcp-kv-cache-interleave-size 8 is deprecated and means different things "
            "with and "
            "without KV transfer; remove it and set spec.decode.kvCacheInterleaveSize [interleave-deprecated-flag]"
        ),
    ),
    "flag and value in one item": (
        ["--max-num-seqs 64"],
        (
            'spec.decode.extraArgs[0]: "--max-num-seqs 64" is one item; vLLM needs the flag and its value apart: '
            '"--max-num-seqs", "64" [extra-args-malformed]'
        ),
    ),
    "a stray word": (
        ["--enforce-eager", "true"],
        'spec.decode.extraArgs[1]: "true" is neither a flag nor the value of one; remove it [extra-args-malformed]',
    ),
    "a flag without its value": (
        ["--max-num-seqs"],
        (
            'spec.decode.extraArgs[0]: "--max-num-seqs" needs a value; write it behind =, or as the next item '
            "[extra-args-malformed]"
        ),
    ),
    "a value for a switch": (
        ["--enforce-eager=true"],
        (
            'spec.decode.extraArgs[0]: "--enforce-eager=true" has a value, but the flag takes none; remove '
            "everything from = "
            "on [extra-args-malformed]"
        ),
    ),
    "an abbreviation of several flags": (
        ["--max-num-b", "1", "--max-num", "1"],
        (
            'spec.decode.extraArgs[2]: "--max-num" abbreviates several flags: --max-num-active-seqs, '
            "--max-num-batched-tokens, --max-num-queued-reqs, --max-num-queued-tokens, --max-num-scheduled-tokens, "
            "--max-num-seqs; write one out [extra-args-malformed]"
        ),
    ),
    "a number that is none": (
        ["-tp", "eight"],
        (
            'spec.decode.extraArgs[0]: -tp (--tensor-parallel-size) has the value "eight", must be a whole number '
            "[extra-args-malformed]"
        ),
    ),
    "a call for help": (
        ["--help"],
        'spec.decode.extraArgs[0]: "--help" prints a text and ends the engine; remove it [extra-args-malformed]',
    ),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses(arguments, message):
    assert violations(decode_args(*arguments)) == [message]


ALLOWED = {
    "a field repeated": ["-tp", "8", "--block-size=64", "--max-model-len", "32768", "-dcp=2"],
    "a switch that is off as the field is": ["--no-enable-expert-parallel"],
    "the served name repeated": ["--served-model-name=chat"],
    "a data type that no field states": [],
    "other flags in all forms": [
        "--max-num-seqs=64",
        "--gpu_memory_utilization",
        "0.9",
        "--enforce-eager",
        "-O3",
        "--compilation-config.level",
        "3",
        '--override-generation-config={"temperature": 0}',
        "--allowed-origins",
        '["*"]',
    ],
    "a value that begins with a minus": ["--seed", "-1"],
}


@pytest.mark.parametrize("arguments", ALLOWED.values(), ids=ALLOWED.keys())
def test_allows_without_a_word(arguments):
    verdict = report(decode_args(*arguments))
    assert (verdict.violations, verdict.warnings) == ((), ())


def test_warns_of_a_flag_that_is_not_known_and_takes_its_value_with_it():
    verdict = report(decode_args("--max-num-seq-s", "64", "--enforce-eager"))
    assert verdict.allowed
    assert [str(finding) for finding in verdict.warnings] == [
        (
            'spec.decode.extraArgs[0]: "--max-num-seq-s" is no flag of vLLM 0.33; did you '
            "mean "
            "--max-num-seqs? [extra-args-unknown]"
        )
    ]


@pytest.mark.parametrize("name", [*TYPED, *OWNED, *MODEL, *SAME_MODEL, *SAME_NUMBERS, DEPRECATED_INTERLEAVE])
def test_vllm_has_every_flag_that_the_operator_answers_for_under_that_name(name):
    assert known_flags().by_name[name].canonical == name


@pytest.mark.parametrize("name", OWNED)
def test_no_spelling_of_an_owned_flag_gets_through(name):
    spec = known_flags().by_name[name]
    for spelling in spec.names:
        arguments = [spelling] if spec.arity == "0" else [f"{spelling}=1"]
        assert [finding.rule for finding in report(decode_args(*arguments)).violations] == ["connector-args"], spelling


@pytest.mark.parametrize("name", TYPED)
def test_no_spelling_of_a_typed_flag_gets_through_with_another_value(name):
    spec = known_flags().by_name[name]
    change = role("decode", dtype="bfloat16", kvCacheDtype="bfloat16", maxModelLen=32768)
    for spelling in spec.names:
        if spelling in spec.off:
            continue
        if spec.arity == "0":
            arguments = [spelling]
        else:
            other = next((choice for choice in spec.choices if choice not in ("auto", "bfloat16")), 16)
            arguments = [f"{spelling}={other}"]
        rules = [finding.rule for finding in report(change, decode_args(*arguments)).violations]
        assert "extra-args-contradict" in rules, spelling
