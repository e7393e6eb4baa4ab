"""Rules on the model: where it comes from, and what is known of it."""

import re
from collections.abc import Iterator

from dcp_operator.api.findings import Severity, show
from dcp_operator.rules.context import Context, Problem, Rule

_REPOSITORY = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?")
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
            yield Problem(path, f"the folder {show(folder)} leaves the volume; write it without ..")
    if model.revision is not None and scheme != "hf":
        yield Problem(
            "spec.model.revision",
            f"{show(model.revision)} with spec.model.uri {show(model.uri)}: only hf:// models have "
            "revisions; remove it",
        )


def unknown_model(context: Context) -> Iterator[Problem]:
    """The model's geometry is stated (a warning).

    Which sizes a model allows depends on its heads. While they are unknown those rules can't be checked, and the
    condition ConfigCompatible stays Unknown.

    State spec.model.geometry; the numbers are in the model's config.json.
    """
    if context.geometry is None:
        yield Problem(
            "spec.model.geometry",
            "is not stated, so heads-divide-tp, gqa-dcp-replicas and dcp-advice were not checked; state attention, "
            "attentionHeads, kvHeads and layers from the model's config.json",
            Severity.WARNING,
        )


RULES = (
    Rule("model-uri", model_uri),
    Rule("unknown-model", unknown_model),
)
