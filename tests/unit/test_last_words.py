"""What failed engines say: outputs of real vLLM, and the messages of the libraries below it."""

from pathlib import Path

import pytest

from dcp_operator.last_words import gist, is_vague, last_words, model_failure

ENDS = Path(__file__).parent / "vllm_ends"
#: What Kubernetes keeps of a failed container's log, in bytes.
EXCERPT = 2048
FOLLOW_UP = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
TRACE = f"""\
Traceback (most recent call last):
  File "x.py", line 1, in <module>
    raise OutOfMemoryError(
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
(EngineCore pid=9) exiting
{FOLLOW_UP}
"""


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("", ""),
        ("\n \n", ""),
        ("only this", "only this"),
        ("ValueError: bad\nINFO: bye", "ValueError: bad"),
        ("a\nb", "b"),
        ("fatal: no disk\nbye", "fatal: no disk"),
        (TRACE, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
        (FOLLOW_UP, FOLLOW_UP),
        ("(Worker pid=2) ERROR 11-30 18:46:12 [a.py:953] RuntimeError: no file", "RuntimeError: no file"),
        ("cp: cannot stat 'x': No such file or directory", "cp: cannot stat 'x': No such file or directory"),
        ("m.ValidationError: 1 validation error for X\n  bad", "m.ValidationError: 1 validation error for X bad"),
    ],
)  # fmt: skip
def test_the_last_words_are_the_line_that_says_most(output: str, expected: str):
    assert last_words(output) == expected


def test_very_long_last_words_are_cut():
    assert len(last_words("ValueError: " + "x" * 5000)) == 400


@pytest.mark.parametrize(
    ("name", "words", "what"),
    [
        ("no-weights", "Cannot find any model weights with `/models/noweights`", "missing or damaged"),
        ("no-room-for-the-cache", "larger than the available KV cache memory", "memory does not hold"),
        ("unknown-architecture", "Model architectures ['FancyNewForCausalLM'] are not supported", "architecture"),
        ("too-long", "User-specified max_model_len (100000) is greater", None),
    ],
)
def test_the_cause_is_found_in_the_output_of_a_real_engine(name: str, words: str, what: str | None):
    text = (ENDS / f"{name}.txt").read_text()
    found = last_words(text)
    assert words in found
    failure = model_failure(text, found)
    assert (failure is None) if what is None else (failure is not None and what in failure.what)
    assert last_words(gist(text)) == found


@pytest.mark.parametrize(
    ("name", "is_lost"),
    [("no-weights", True), ("no-room-for-the-cache", True), ("unknown-architecture", True), ("too-long", False)],
)
def test_an_excerpt_that_has_lost_the_cause_is_vague(name: str, is_lost: bool):
    text = (ENDS / f"{name}.txt").read_text()
    assert is_vague(text[-EXCERPT:]) is is_lost
    assert not is_vague(text)


#: Messages as huggingface_hub, transformers, safetensors, vLLM and the C library print them.
MESSAGES = {
    "GatedRepoError: 401 Client Error. Cannot access gated repo for url https://hf.co/x": "refuses the model",
    "OSError: You are trying to access a gated repo.": "refuses the model",
    "RepositoryNotFoundError: 404 Client Error. Repository Not Found for url: https://hf.co/x": "no such model",
    "OSError: acme/none is not a local folder and is not a valid model identifier listed on 'https://huggingface.co'":
        "no such model",
    "ValueError: Invalid repository ID or local directory specified: 'acme/none'.": "no such model",
    "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder for the "
    "specified revision on the local disk and outgoing traffic has been disabled.": "no such model",
    "huggingface_hub.errors.RevisionNotFoundError: 404 Client Error.": "no such revision",
    "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': "
    "'/models/none'. Use `repo_type` argument if needed.": "no such folder",
    "OSError: It looks like the config file at '/models/x/config.json' is not a valid JSON file.": "missing or damaged",
    "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge": "missing or damaged",
    "ValueError: Following weights were not initialized from checkpoint: {'lm_head.weight'}": "missing or damaged",
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`": "memory does not",
    "ValueError: Free memory on device cuda:0 (3.1/79.2 GiB) on startup is less than desired GPU memory utilization":
        "memory does not",
    "torch.OutOfMemoryError: CUDA out of memory.": "memory does not",
    "ValueError: The checkpoint you are trying to load has model type `new` but Transformers does not recognize this "
    "architecture.": "architecture",
    "ValueError: Please pass the argument `trust_remote_code=True` to allow custom code to be run.": "code of its own",
    "requests.exceptions.ConnectionError: Max retries exceeded with url: /x": "can't be reached",
    "httpx.ConnectError: [Errno -3] Temporary failure in name resolution": "can't be reached",
    "OSError: [Errno 28] No space left on device": "disk is full",
    "ValueError: the KV cache is a MambaSpec": None,
    "RuntimeError: NCCL error: unhandled system error": None,
}  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES)
def test_what_keeps_a_model_from_loading_is_told_from_other_failures(message: str):
    failure = model_failure(message, last_words(message))
    expected = MESSAGES[message]
    assert (failure is None) if expected is None else (failure is not None and expected in failure.what)


def test_memory_that_runs_out_while_requests_are_served_is_no_failure_to_load():
    text = f"(EngineCore pid=9) ERROR 11-30 18:46:12 [core.py:1] EngineCore encountered a fatal error.\n{TRACE}"
    assert model_failure(TRACE, last_words(TRACE)) is not None
    assert model_failure(text, last_words(text)) is None
    assert model_failure(gist(text), last_words(gist(text))) is None
