"""Rules on the model: where it comes from, and what is known of it."""

import re
from collections.abc import Iterator

from dcp_operator.api import sentences
from dcp_operator.api.findings import Severity, show
from dcp_operator.rules.context import Context, Problem, Rule
from dcp_operator.rules.edits import REMOVED, Fix

_REPOSITORY = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?")
#: The rules with `needs_model`; a test holds the two together.
NEED_MODEL = "heads-divide-tp, gqa-dcp-replicas, dcp-advice, dcp-full-attention-only, part of connector-takes-pair"
_CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


def model_uri(context: Context) -> Iterator[Problem]:
    """spec.model.uri names something that can exist, and what stands beside it belongs to its kind.

    hf:// takes a repository, pvc:// the name of a PersistentVolumeClaim and a folder on it, oci:// an image. A
    revision belongs to a Hugging Face repository; a volume or an image has none.

    Correct the field that the message names.
    """
    model = context.spec.model
    scheme, _, rest = model.uri.partition("://")
    path = "spec.model.uri"
    if scheme == "hf" and not _REPOSITORY.fullmatch(rest):
        yield Problem(path, f"{show(rest)} is no Hugging Face repository; write hf://OWNER/NAME")
    if scheme == "pvc":
        claim, _, folder = rest.partition("/")
        if not _CLAIM.fullmatch(claim):
            yield Problem(path, f"{show(claim)} is no name of a PersistentVolumeClaim; write pvc://CLAIM/FOLDER")
        if ".." in folder.split("/"):
            yield Problem(path, f'the folder {show(folder)} leaves the volume; write it without ".." in it')
    if model.revision is not None and scheme != "hf":
        yield Problem(
            "spec.model.revision",
            f"{show(model.revision)} with spec.model.uri {show(model.uri)}: only hf:// models have "
            "revisions; remove it",
            fixes=(Fix("spec.model.revision", REMOVED),),
        )


def model_cache(context: Context) -> Iterator[Problem]:
    """spec.model.cache belongs to a model of a hub, and its folder lies on the claim.

    The Job pulls what a hub has. A model on a claim or in an image is where it is, for both roles.

    Leave the cache out, or name the model by an hf:// URI.
    """
    model, path = context.spec.model, "spec.model.cache"
    if model.cache is None:
        return
    if not model.uri.startswith("hf://"):
        yield Problem(path, sentences.CACHE_NEEDS_HUB.say(), fixes=(Fix(path, REMOVED),))
    if model.cache.path is not None and {".", ".."} & set(model.cache.path.split("/")):
        yield Problem(
            f"{path}.path",
            f"{show(model.cache.path)} has a dot for a folder; write the path without it",
            fixes=(Fix(f"{path}.path", REMOVED),),
        )


def unknown_model(context: Context) -> Iterator[Problem]:
    """The model's geometry is stated, or in the catalogue (a warning).

    Which sizes a model allows depends on its heads and layers. While they are unknown, the rules that the message names
    can't be checked, and the condition ConfigCompatible is Unknown until engines of both roles run.

    State spec.model.geometry; the numbers are in the model's config.json. An installation can add models to the
    catalogue.
    """
    if context.facts is None:
        yield Problem(
            "spec.model.geometry",
            f"is not stated and the catalogue lacks the model, so not checked: {NEED_MODEL}; state it from config.json",
            Severity.WARNING,
        )


RULES = (
    Rule("model-uri", model_uri),
    Rule("model-cache", model_cache, sources=("kserve #4918",)),
    Rule("unknown-model", unknown_model),
)
