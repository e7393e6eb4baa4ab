"""From files and stdin to the documents in them, with the place where each was found."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from dcp_operator.api.load import is_ours
from dcp_operator.cli.problems import CliError
from dcp_operator.cli.yaml_io import YamlError, read_documents

STDIN = "-"
_SUFFIXES = frozenset({".yaml", ".yml", ".json"})


@dataclass(frozen=True, slots=True)
class Document:
    """One DCPDisaggDeployment of a file; `file` is `-` for stdin.

    `number` counts the documents of the file from 0, others among them; `item` is the position in a list of objects,
    as kubectl prints it, None outside of one.
    """

    file: str
    body: dict[str, Any]
    number: int = 0
    item: int | None = None

    def metadata(self, field: str) -> str:
        """Return a string of the document's metadata; empty where there is none."""
        metadata = self.body.get("metadata")
        value = cast("dict[Any, Any]", metadata).get(field) if isinstance(metadata, dict) else None
        return value if isinstance(value, str) else ""

    @property
    def title(self) -> str:
        """Namespace and name, as far as they are given."""
        name = self.metadata("name") or self.metadata("generateName") or "(without a name)"
        namespace = self.metadata("namespace")
        return f"{namespace}/{name}" if namespace else name


@dataclass(frozen=True, slots=True)
class Contents:
    """What was found in all files: our objects, how many others there were, and what could not be read."""

    documents: tuple[Document, ...]
    others: tuple[str, ...]
    unreadable: tuple[str, ...]
    #: The text of every file that was read, by its name: for who wants to point at a line.
    texts: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)


def read_files(arguments: Sequence[str]) -> Contents:
    """Read every file, folder and stdin. What can't be read is reported beside what can, never raised."""
    documents: list[Document] = []
    others: list[str] = []
    unreadable: list[str] = []
    texts: dict[str, str] = {}
    for argument in arguments:
        try:
            files = _files(argument)
        except CliError as error:
            unreadable.append(str(error))
            continue
        for file in files:
            try:
                texts[file] = _text(file)
                _sort_out(file, texts[file], documents, others)
            except CliError as error:
                unreadable.append(str(error))
    return Contents(tuple(documents), tuple(others), tuple(unreadable), texts)


def _files(argument: str) -> list[str]:
    """Return the files behind one argument, in a stable order."""
    path = Path(argument)
    if argument == STDIN or not path.is_dir():
        return [argument]
    found = sorted(str(each) for each in path.rglob("*") if each.suffix in _SUFFIXES and each.is_file())
    if not found:
        raise CliError(f"{argument}: the folder holds no .yaml, .yml or .json file")
    return found


def _text(file: str) -> str:
    content = sys.stdin.buffer.read() if file == STDIN else _read(Path(file))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CliError(f"{file}: is no text in UTF-8 (byte {error.start})") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CliError(f"{path}: can't be read: {reason}") from error


def _sort_out(name: str, text: str, documents: list[Document], others: list[str]) -> None:
    try:
        for number, body in enumerate(read_documents(text)):
            for position, item in _items(body):
                if is_ours(item):
                    documents.append(Document(name, item, number, position))
                elif isinstance(item, dict):
                    kind = cast("dict[str, Any]", item).get("kind")
                    others.append(f"{name}: {kind}" if isinstance(kind, str) else f"{name}: an object without a kind")
                elif item is not None:
                    raise CliError(f"{name}: holds no object of Kubernetes but a {type(item).__name__}")
    except YamlError as error:
        raise CliError(f"{name}: {error}") from error


def _items(body: Any) -> Iterator[tuple[int | None, Any]]:
    """Yield the objects of a list, as `kubectl get -o yaml` prints it, each with its position, or the document."""
    if isinstance(body, dict):
        fields = cast("dict[str, Any]", body)
        items = fields.get("items")
        if isinstance(items, list) and str(fields.get("kind")).endswith("List"):
            yield from enumerate(cast("list[Any]", items))
            return
    yield None, body
