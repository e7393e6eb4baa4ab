"""The catalogue of an installation: what this release knows, and what a mounted file adds to it.

The file is a ConfigMap's (`catalogue` in the chart's values). It is read at the start and whenever it changes, never
for a request; what is wrong in it is logged in words, and the rest of the catalogue stays.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import yaml

from dcp_operator.catalogue import Catalogue, ModelFacts, builtin, read_entries

log = logging.getLogger(__name__)

#: Environment variable that names the file; without it only the built-in models are known.
VARIABLE: Final = "DCP_CATALOGUE_FILE"
_POLL_S: Final = 5.0
#: A ConfigMap holds no more; another file that does is no catalogue.
_MAX_BYTES: Final = 1024 * 1024
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class CatalogueFile:
    """The catalogue with the models of a file; `catalogue` is replaced whole when the file changes."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._read: bytes | str | None = None
        self.catalogue: Catalogue = builtin()

    def refresh(self) -> bool:
        """Read the file if it is not what was read last; return whether it was. Never fails: it logs.

        A file that can't be read as a whole adds nothing, so that every process of an installation comes to the same
        catalogue, whenever it started.
        """
        if self._path is None:
            return False
        content = _content(self._path)
        if content == self._read:
            return False
        self._read = content
        models, problems = ([], [content]) if isinstance(content, str) else _parse(content)
        for problem in problems:
            log.warning("catalogue entry left out file=%s problem=%s", self._path, problem)
        self.catalogue = builtin().with_models(models)
        log.info("catalogue read file=%s models=%d left_out=%d", self._path, len(models), len(problems))
        return True

    async def keep_fresh(self, changed: Callable[[Catalogue], None] = lambda _: None) -> None:
        """Look at the file every few seconds and tell of each change. A mounted ConfigMap sends no events."""
        while True:
            await asyncio.sleep(_POLL_S)
            if await asyncio.to_thread(self.refresh):
                changed(self.catalogue)


def from_environment(value: str) -> CatalogueFile:
    """Return the catalogue of the file that an environment variable names, read once."""
    file = CatalogueFile(Path(value) if value.strip() else None)
    file.refresh()
    return file


def _content(path: Path) -> bytes | str:
    """Return what is in a file, or why it can't be read."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        return f"can't be read: {error.strerror or error}; only the built-in models are known"
    if len(content) > _MAX_BYTES:
        return f"is larger than {_MAX_BYTES} bytes; only the built-in models are known"
    return content


def _parse(content: bytes) -> tuple[list[ModelFacts], list[str]]:
    try:
        document: Any = yaml.load(content, Loader=_LOADER)  # noqa: S506 - the safe loader, in C
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return [], [f"is no YAML: {' '.join(str(error).split())}; only the built-in models are known"]
    return read_entries(document)
