"""Which vLLM an image holds, as far as its name tells."""

import re
from typing import Final

#: Versions of vLLM that are supported, oldest first: those whose flag tables lie beside this module.
SUPPORTED: Final = ("0.32", "0.33")

_TAG = re.compile(r"v?(\d{1,4}\.\d{1,4})(?![0-9])")


def image_version(image: str) -> str | None:
    """Return vLLM's major and minor version from an image's tag, such as "0.33"; None where the name doesn't tell.

    Only an image whose own name holds "vllm" is believed: the tag of another one counts something else.
    """
    name = image.partition("@")[0].rpartition("/")[2]
    repository, _, tag = name.partition(":")
    found = _TAG.match(tag) if "vllm" in repository.lower() else None
    return found.group(1) if found else None
