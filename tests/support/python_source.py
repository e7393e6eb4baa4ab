"""What Python source declares, read without importing it: classes, fields, methods, names."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


class Source:
    """A folder of packages. `module` is a dotted name, a class or function a name in it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def text(self, module: str) -> str:
        path = self.root.joinpath(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        assert file.is_file(), f"there is no module {module}"
        return file.read_text()

    def names(self, module: str) -> set[str]:
        """Everything that `from module import name` finds: definitions, assignments, imports, submodules."""
        found: set[str] = set()
        for node in ast.walk(_parse(self.text(module))):
            match node:
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                    found.add(node.name)
                case ast.Assign():
                    found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(name)
                case ast.Import() | ast.ImportFrom():
                    found |= {alias.asname or alias.name for alias in node.names}
                case _:
                    pass
        folder = self.root.joinpath(*module.split("."))
        return found | ({path.stem for path in folder.iterdir()} if folder.is_dir() else set())

    def lineage(self, module: str, name: str) -> list[ast.ClassDef]:
        """A class and those of its bases that stand in the same module."""
        classes = {node.name: node for node in _parse(self.text(module)).body if isinstance(node, ast.ClassDef)}
        assert name in classes, f"{module} has no class {name}"
        found, waiting = [], [name]
        while waiting:
            node = classes.get(waiting.pop(0))
            if node is not None and node not in found:
                found.append(node)
                waiting += [base.id for base in node.bases if isinstance(base, ast.Name)]
        return found

    def members(self, module: str, name: str) -> set[str]:
        """Fields, class variables, methods, and attributes that a method sets on itself."""
        found: set[str] = set()
        for node in (each for cls in self.lineage(module, name) for each in ast.walk(cls)):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    found.add(node.name)
                case (
                    ast.AnnAssign(target=ast.Name(id=field))
                    | ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=field))
                ):
                    found.add(field)
                case ast.Assign():
                    found |= {field for target in node.targets for field in _assigned(target)}
                case _:
                    pass
        return found

    def fields(self, module: str, name: str) -> list[str]:
        """The annotated fields of a class itself, in order: those of a dataclass's constructor."""
        return [
            node.target.id
            for node in self.lineage(module, name)[0].body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]

    def constants(self, module: str, name: str) -> dict[str, object]:
        """The members of an enum whose values are literals."""
        return {
            target.id: ast.literal_eval(node.value)
            for node in self.lineage(module, name)[0].body
            if isinstance(node, ast.Assign) and _is_literal(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def enum_names(self, module: str, name: str) -> set[str]:
        body = self.lineage(module, name)[0].body
        return {target.id for node in body if isinstance(node, ast.Assign) for target in node.targets}  # type: ignore[attr-defined]

    def methods(self, module: str, name: str) -> dict[str, ast.FunctionDef]:
        """The methods of a class itself."""
        return {node.name: node for node in self.lineage(module, name)[0].body if isinstance(node, ast.FunctionDef)}


def parameters(method: ast.FunctionDef) -> list[str]:
    """Positional and keyword parameters in order, without self or cls."""
    arguments = method.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def required(method: ast.FunctionDef) -> list[str]:
    """Parameters without a default, without self or cls."""
    arguments = method.args
    positional = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    positional = positional[: len(positional) - len(arguments.defaults)]
    keyword = [a.arg for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None]
    return [name for name in (*positional, *keyword) if name not in ("self", "cls")]


def is_abstract(method: ast.FunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "abstractmethod" for each in method.decorator_list)


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def _assigned(target: ast.expr) -> list[str]:
    match target:
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name):
            return [name]
        case ast.Tuple(elts=parts):
            return [name for part in parts for name in _assigned(part)]
        case _:
            return []


def _is_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except ValueError:
        return False
    return True
