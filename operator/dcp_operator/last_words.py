"""What an engine said before it ended: the line that names the cause, and whether it is about loading the model.

vLLM fails in one of its processes, and then the others fail for it: the last lines of the log are those of the API
server, whose traceback alone is longer than what Kubernetes keeps of a container's log (2 KiB). So a line that only
points elsewhere counts as no cause (`is_vague`), and the whole log has to be asked for.

Sources: vLLM 0.32 and 0.33 (`v1/engine/core.py`, `v1/executor/multiproc_executor.py`, `model_executor/model_loader/`,
`model_executor/models/registry.py`, `v1/core/kv_cache_utils.py`, `v1/worker/utils.py`, `config/model.py`,
`transformers_utils/config.py`), huggingface_hub's and transformers' errors.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

#: Longest text that is repeated from an engine or from Kubernetes.
MAX_WORDS: Final = 400
#: "(EngineCore pid=61) ERROR 11-30 18:46:15 [core.py:1510] " in front of what is said.
_PREFIX: Final = re.compile(r"^(\([\w-]+ pid=\d+\) )?([A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
#: An exception as Python prints it; the statement that raises it, in a traceback, has no colon behind the name.
_EXCEPTION: Final = re.compile(r"^[\w.]*(Error|Exception|Exit|Interrupt)(:|$)")
_ERROR_LINE: Final = re.compile(r"(^|[\s(])([A-Za-z_.]*(Error|Exception|Exit)\b|error:|fatal:|cannot |No such)")
_STATEMENT: Final = re.compile(r"^(\s|raise |File \"|\^)")
#: What one process says when another one failed.
_FOLLOW_UP: Final = re.compile(r"See root cause above|See stack trace for root cause|^During handling of the above")
#: pydantic's first line; what is wrong is in the next one.
_VALIDATION: Final = re.compile(r"^[\w.]*ValidationError: \d+ validation errors? for ")
#: An engine that had started and failed later.
_WHILE_SERVING: Final = "EngineCore encountered a fatal error"


@dataclass(frozen=True, slots=True)
class ModelFailure:
    """A way in which a model can't be loaded: what it is, and what to do."""

    what: str
    cure: str


def _failures() -> tuple[tuple[re.Pattern[str], ModelFailure], ...]:
    """Return the known messages, the most special first."""
    memory = ModelFailure(
        "the accelerators' memory does not hold the model and its KV cache",
        "spread it over more of them (parallelism.tensor), share the KV cache out (decodeContext), lower maxModelLen, "
        "or change --gpu-memory-utilization in extraArgs",
    )
    gated = ModelFailure(
        "the hub refuses the model to this token",
        "accept the model's terms on its page, and name a Secret with a token of that account in "
        "spec.model.authSecretName",
    )
    missing = ModelFailure(
        "there is no such model",
        "check spec.model.uri; a private one needs a token in spec.model.authSecretName, and HF_HUB_OFFLINE takes only "
        "what is on the disk",
    )
    revision = ModelFailure("the model has no such revision", "check spec.model.revision")
    folder = ModelFailure(
        "there is no such folder in the pod",
        "check the path in spec.model.uri and that the claim holds the model there",
    )
    architecture = ModelFailure(
        "this engine does not know the model's architecture", "use an image with a newer vLLM, or another model"
    )
    code = ModelFailure(
        "the model brings code of its own", "if you trust it, add --trust-remote-code to extraArgs of both roles"
    )
    network = ModelFailure(
        "the hub can't be reached",
        "check the pods' way out (proxy, DNS), set HF_ENDPOINT to a mirror, or keep the model on a claim (pvc://)",
    )
    disk = ModelFailure(
        "the disk is full", "give the pod more ephemeral storage, or keep the model on a claim (pvc://)"
    )
    incomplete = ModelFailure(
        "files of the model are missing or damaged",
        "fetch the model again: a download that was cut off looks like this",
    )
    said = (
        (r"GatedRepoError|gated repo|Access to model .* is restricted|40[13] Client Error|403 Forbidden", gated),
        (r"RevisionNotFoundError|Revision Not Found|is not a valid git identifier", revision),
        (r"HFValidationError|Repo id must (be|use)", folder),
        (r"Temporary failure in name resolution|NameResolutionError|Max retries exceeded|ConnectTimeout", network),
        (r"couldn't connect to '?https?://|ConnectError|Network is unreachable", network),
        (r"RepositoryNotFoundError|Repository Not Found|is not a valid model identifier", missing),
        (r"Invalid repository ID or local directory|LocalEntryNotFoundError|appropriate cached snapshot", missing),
        (r"No space left on device", disk),
        (r"trust_remote_code|trust-remote-code|requires you to execute the configuration file", code),
        (r"are not supported for now|does not recognize this architecture|has no vLLM implementation", architecture),
        (r"Cannot find any model weights|is not a valid JSON file|SafetensorError|HeaderTooLarge", incomplete),
        (r"were not initialized from checkpoint|Could not detect config format|MetadataIncompleteBuffer", incomplete),
        (r"does not appear to have a file named|PytorchStreamReader failed", incomplete),
        (r"No available memory for the cache blocks|larger than the available KV cache memory", memory),
        (r"Free memory on device .* is less than|OutOfMemoryError|CUDA out of memory|HIP out of memory", memory),
    )
    return tuple((re.compile(pattern), failure) for pattern, failure in said)


_FAILURES: Final = _failures()


def last_words(text: str) -> str:
    """Return the line of a container's last output that says most: the last that names a cause, else the last one."""
    lines = _lines(text)
    exceptions = [index for index, line in enumerate(lines) if _EXCEPTION.search(line) and not _is_vague(line)]
    if exceptions:
        return cut(_with_detail(lines, exceptions[-1]))
    plain = [line for line in lines if not _STATEMENT.match(line)]
    errors = [line for line in plain if _ERROR_LINE.search(line)]
    causes = [line for line in errors if not _is_vague(line)]
    chosen = causes or errors or plain or lines
    return cut(chosen[-1]) if chosen else ""


def is_vague(text: str) -> bool:
    """Whether a container's last output names no cause: it is empty, or says that the cause stands further above."""
    words = last_words(text)
    return not words or _is_vague(words) or not any(_ERROR_LINE.search(line) for line in _lines(text))


def gist(text: str) -> str:
    """Return what of a container's output the other functions here read, in two lines."""
    return "\n".join([*([_WHILE_SERVING] if _WHILE_SERVING in text else []), last_words(text)])


def model_failure(text: str, words: str) -> ModelFailure | None:
    """Return which way of not loading a model the last words tell, None for another failure.

    `text` is the whole output: memory that runs out while requests are served is no failure to load.
    """
    found = next((failure for pattern, failure in _FAILURES if pattern.search(words)), None)
    return None if found is None or _WHILE_SERVING in text else found


def cut(words: str) -> str:
    """Return a text in one line, cut to what fits into a message."""
    text = " ".join(words.split())
    return text if len(text) <= MAX_WORDS else text[: MAX_WORDS - 3] + "..."


def _lines(text: str) -> list[str]:
    """Return the lines without the process and the place in the source in front; indented ones stay so."""
    stripped = (_PREFIX.sub("", line, count=1).rstrip() for line in text.splitlines())
    return [line for line in stripped if line.strip()]


def _with_detail(lines: Sequence[str], index: int) -> str:
    """Return an exception's line, with the next one where the first says only that there is one."""
    line = lines[index]
    is_short = _VALIDATION.match(line) or line.rstrip().endswith(":") or ":" not in line
    return f"{line} {lines[index + 1].strip()}" if is_short and index + 1 < len(lines) else line


def _is_vague(line: str) -> bool:
    return _FOLLOW_UP.search(line) is not None
