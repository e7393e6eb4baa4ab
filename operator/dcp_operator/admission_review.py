"""The admission protocol: an AdmissionReview of the API server in, one with the answer out. Pure.

Whatever comes in, the answer is a review with words in it: a user reads it behind `kubectl apply`. What does not
concern the object's spec (deletes, subresources) is let pass.
"""

import json
from typing import Any, Final, cast

from dcp_operator.admission import review
from dcp_operator.api.base import API_VERSION, GROUP, KIND, PLURAL
from dcp_operator.api.findings import show
from dcp_operator.catalogue import Catalogue
from dcp_operator.flags.versions import SUPPORTED

_REVIEW_VERSION: Final = "admission.k8s.io/v1"
_JUDGED: Final = ("CREATE", "UPDATE")
_NO_REVIEW: Final = "the request is not an AdmissionReview that this webhook understands"
_TOO_DEEP: Final = "the object is nested too deeply to be judged; templates and extraConfig need some ten levels"

#: The API server shows no more of a refusal than fits a terminal, and an answer must not be as large as a request.
_MAX_MESSAGE: Final = 64 * 1024


class NoReviewError(ValueError):
    """A request that is no AdmissionReview; the message says what it is instead."""


def answer(request: bytes, catalogue: Catalogue | None = None) -> dict[str, Any]:
    """Return the AdmissionReview that answers one. Never fails for anything that can be sent, nested however deeply."""
    uid = ""
    try:
        asked = _request(request)
        uid = cast("str", asked["uid"])
        return _judge(asked, catalogue)
    except NoReviewError as error:
        return refusal(uid, f"{_NO_REVIEW}: {error}", 400)
    except RecursionError:
        return refusal(uid or uid_in(request), _TOO_DEEP, 422)


def refusal(uid: str, message: str, code: int, warnings: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the AdmissionReview that refuses a request; the code is that of HTTP."""
    response: dict[str, Any] = {"status": {"message": message[:_MAX_MESSAGE], "code": code}}
    return _answered(uid, False, warnings, response)


def _answered(uid: str, allowed: bool, warnings: tuple[str, ...] = (), more: Any = None) -> dict[str, Any]:
    response: dict[str, Any] = {"uid": uid, "allowed": allowed, **(more or {})}
    if warnings:
        response["warnings"] = list(warnings)
    return {"apiVersion": _REVIEW_VERSION, "kind": "AdmissionReview", "response": response}


def _request(content: bytes) -> dict[str, Any]:
    """Return the request in a review. Raises NoReviewError."""
    try:
        document: Any = json.loads(content)
    except ValueError as error:
        raise NoReviewError("it is no JSON") from error
    asked: Any = cast("dict[Any, Any]", document).get("request") if isinstance(document, dict) else None
    if not isinstance(asked, dict):
        raise NoReviewError("it has no request")
    fields = cast("dict[str, Any]", asked)
    if not isinstance(fields.get("uid"), str):
        raise NoReviewError("its request has no uid")
    return fields


def _judge(asked: dict[str, Any], catalogue: Catalogue | None) -> dict[str, Any]:
    uid = cast("str", asked["uid"])
    resource = asked.get("resource")
    named = cast("dict[str, Any]", resource) if isinstance(resource, dict) else {}
    if (named.get("group"), named.get("resource")) != (GROUP, PLURAL):
        found = f"{show(named.get('resource'))} of {show(named.get('group'))}"
        return refusal(uid, f"this webhook judges {PLURAL} of {GROUP} and was asked about {found}", 400)
    if asked.get("operation") not in _JUDGED or asked.get("subResource"):
        return _answered(uid, True)
    new, old = asked.get("object"), asked.get("oldObject")
    if not isinstance(new, dict):
        return refusal(uid, f"the request holds no {KIND}; send the object as a map", 400)
    before = cast("dict[str, Any]", old) if isinstance(old, dict) else None
    verdict = review(cast("dict[str, Any]", new), before, catalogue)
    if verdict.refusal is not None:
        return refusal(uid, verdict.refusal, 422, verdict.warnings)
    return _answered(uid, True, verdict.warnings)


def uid_in(content: bytes) -> str:
    """Return the uid of a review that can't be parsed, such as one nested too deeply; it stands before the object.

    The API server takes an answer only with the uid that it asked with.
    """
    _, found, rest = content.partition(b'"uid":')
    text = rest[:256].lstrip()
    if not found or not text.startswith(b'"'):
        return ""
    return text[1:].partition(b'"')[0].decode("ascii", "replace")


def warm_up() -> None:
    """Judge an object for every supported vLLM, so that everything that is read once per process has been read."""
    for image in ("acme/engine:1", *(f"vllm/vllm-openai:v{version}.0" for version in SUPPORTED)):
        answer(json.dumps(_sample(image)).encode())


def _sample(image: str) -> dict[str, Any]:
    role = {"parallelism": {"tensor": 2}, "extraArgs": ["--max-num-seqs=64"]}
    spec = {"model": {"uri": "hf://acme/tiny"}, "image": image, "prefill": role, "decode": role}
    return {
        "request": {
            "uid": "warm-up",
            "operation": "CREATE",
            "resource": {"group": GROUP, "resource": PLURAL},
            "object": {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "warm-up"}, "spec": spec},
        }
    }
