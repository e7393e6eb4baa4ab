"""Rules on the engines' images: both roles run one version of vLLM."""

from collections.abc import Iterator

from dcp_operator.api.findings import Severity, show
from dcp_operator.flags import image_version
from dcp_operator.rules.context import Context, Problem, Rule
from dcp_operator.rules.edits import REMOVED, Fix


def image_parity(context: Context) -> Iterator[Problem]:
    """Both roles run the same image, or at least the same minor version of vLLM.

    Between minor versions the layout of the KV cache, the hashes of blocks and the connector's handshake change: a
    transfer is refused, or its bytes mean something else. Images that differ otherwise are a warning, because nothing
    tells whether their engines do.

    Leave spec.prefill.image and spec.decode.image out, or give both a tag of the same vLLM version.
    """
    prefill, decode = (role.stated.image or context.spec.image for role in context.roles)
    if prefill == decode:
        return
    role = context.decode if context.decode.stated.image is not None else context.prefill
    path, other = f"{role.path}.image", "spec.prefill.image" if role is context.decode else "spec.decode.image"
    here, there = (decode, prefill) if role is context.decode else (prefill, decode)
    if (context.prefill if role is context.decode else context.decode).stated.image is None:
        other = "spec.image"
    versions = image_version(here), image_version(there)
    found = f"{show(here)} differs from {other} {show(there)}"
    if all(versions) and versions[0] != versions[1]:
        yield Problem(
            path,
            f"{found}: vLLM {versions[0]} and {versions[1]} keep and transfer KV differently; give both roles one "
            "version, or leave the field out",
            fixes=tuple(Fix(each, REMOVED) for each in (path, other) if each != "spec.image"),
        )
    else:
        yield Problem(
            path,
            f"{found}, and prefill and decode must run the same version of vLLM; leave the field out unless you know "
            "that they do",
            Severity.WARNING,
        )


RULES = (Rule("image-parity", image_parity, sources=("llm-d #499",)),)
