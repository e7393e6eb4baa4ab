"""YAML as kubectl reads it: strings stay strings where PyYAML would make dates or base-60 numbers of them.

A repeated key is an error here: the parsers of Kubernetes keep one of the values, and which one is a matter of luck.
"""

import re
from collections.abc import Iterator
from typing import Any, Final, cast

import yaml

#: Nodes in one document, aliases expanded. The API server takes far smaller objects.
_MAX_NODES: Final = 500_000
_MAX_DEPTH: Final = 100

#: The stubs leave parameters of `dump` open, which strict checking refuses.
_YAML: Any = yaml
_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

_INTEGER = re.compile(r"[-+]?0b[0-1_]+|[-+]?0[0-7_]+|[-+]?(?:0|[1-9][0-9_]*)|[-+]?0x[0-9a-fA-F_]+")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
)


class YamlError(ValueError):
    """A text that can't be read; the message says where and what is wrong."""


class _Loader(_BASE):
    """PyYAML's safe loader, with the resolvers of Kubernetes' YAML and without silent overwriting."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own protocol

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Refuse a key that is given twice; everything else is PyYAML's."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag.endswith(":str") and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value} is given twice", key.start_mark
                )
            seen.add(key.value if isinstance(key.value, str) else "")
        return _BASE.construct_mapping(self, node, deep=deep)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    patterns = {"tag:yaml.org,2002:int": _INTEGER, "tag:yaml.org,2002:float": _FLOAT}
    return {
        first: [
            (tag, re.compile(f"^(?:{patterns[tag].pattern})$") if tag in patterns else pattern)
            for tag, pattern in choices
            if tag != "tag:yaml.org,2002:timestamp"
        ]
        for first, choices in _BASE.yaml_implicit_resolvers.items()
    }


_Loader.yaml_implicit_resolvers = _resolvers()


def read_documents(text: str) -> Iterator[Any]:
    """Yield every document of a YAML or JSON text, as JSON values only. Raises YamlError."""
    try:
        for document in yaml.load_all(text, Loader=_Loader):
            yield _as_json(document, _Budget())
    except yaml.MarkedYAMLError as error:
        raise YamlError(_sentence(error)) from error
    except yaml.YAMLError as error:
        raise YamlError(f"is no YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise YamlError("is nested too deeply to be an object of Kubernetes") from error
    except ValueError as error:
        if isinstance(error, YamlError):
            raise
        raise YamlError(f"holds a value that can't be read: {error}") from error


def write_document(document: Any) -> str:
    """Return one document as YAML, keys in their order."""
    return _YAML.dump(document, Dumper=_DUMPER, sort_keys=False, allow_unicode=True, width=120)


class _Budget:
    """Counts what a document expands to: a few aliases can stand for billions of nodes."""

    def __init__(self) -> None:
        self.nodes = 0

    def spend(self) -> None:
        self.nodes += 1
        if self.nodes > _MAX_NODES:
            raise YamlError(f"expands to more than {_MAX_NODES} values, too many for an object of Kubernetes")


def _as_json(value: Any, budget: _Budget, depth: int = 0) -> Any:
    """Return a copy without aliases. Raises YamlError for what JSON can't hold, and for nesting without end."""
    budget.spend()
    if depth > _MAX_DEPTH:
        raise YamlError(f"is nested more than {_MAX_DEPTH} levels deep, too deep for an object of Kubernetes")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_as_json(item, budget, depth + 1) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        fields = cast("dict[Any, Any]", value)
        return {_key(key): _as_json(item, budget, depth + 1) for key, item in fields.items()}
    raise YamlError(f"holds a {type(value).__name__}, which JSON has no form for")


def _key(key: object) -> str:
    """Return a key as the string that Kubernetes makes of it."""
    if isinstance(key, bool):
        return "true" if key else "false"
    if key is None:
        return "null"
    if isinstance(key, (int, float, str)):
        return str(key)
    raise YamlError("has a key that is no string")


def _sentence(error: yaml.MarkedYAMLError) -> str:
    mark: Any = error.problem_mark or error.context_mark
    where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return f"is no YAML{where}: {error.problem or error.context or 'unknown problem'}"
