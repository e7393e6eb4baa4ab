"""The repository's shape: bare folders, what the wheel holds, and what an import may pull in."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: Folder on the path -> the one package that lies in it.
SOURCES = {"operator": "dcp_operator", "connector": "dcp_connector"}

#: Modules of the connector that may import torch, vllm or mooncake. All others are pure or plain stdlib.
ENGINE_SIDE = {"_vllm", "compat", "connector", "prometheus", "scheduler", "tensors", "transfer", "worker"}

#: Imports modules one after the other and says which of them asked for one of the engine's packages, installed or not.
_WATCH = """
import importlib, importlib.abc, sys
asked = []
class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("torch", "vllm", "mooncake"):
            asked.append(f"{module} asks for {name}")
        return None
sys.meta_path.insert(0, Watch())
for module in sys.argv[1:]:
    importlib.import_module(module)
print(*asked, sep="\\n")
"""


def python(code: str, *arguments: str) -> str:
    """Run code as a user would, from the repository's root with that folder first on the path."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def connector_modules() -> list[str]:
    return sorted(path.stem for path in (ROOT / "connector/dcp_connector").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize(("folder", "package"), SOURCES.items())
def test_a_source_folder_holds_its_package_and_nothing_else(folder: str, package: str) -> None:
    found = sorted(path.name for path in (ROOT / folder).iterdir() if path.name != "__pycache__")
    assert found == [package], "an __init__.py here would shadow the standard library's operator module"


def test_no_folder_called_operator_is_a_package() -> None:
    found = [path for path in ROOT.rglob("operator/__init__.py") if not {".venv", "build"} & set(path.parts)]
    assert found == []


def test_the_standard_librarys_operator_is_the_one_that_python_finds() -> None:
    where = python("import operator, collections; print(operator.__file__); print(operator.add(1, 2))")
    path, total = where.splitlines()
    assert not Path(path).is_relative_to(ROOT / "operator")
    assert total == "3"


def test_test_folders_are_no_packages() -> None:
    assert [str(path) for path in (ROOT / "tests").rglob("__init__.py") if "engine_plugin" not in path.parts] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    [path] = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_two_packages_and_its_metadata(wheel: zipfile.ZipFile) -> None:
    top = {name.partition("/")[0] for name in wheel.namelist()}
    [metadata] = [name for name in top if name.endswith(".dist-info")]
    assert top == {*SOURCES.values(), metadata}
    assert metadata.startswith("dcp_disagg-")


def test_every_module_of_the_source_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    source = {
        str(path.relative_to(ROOT / folder))
        for folder, package in SOURCES.items()
        for path in (ROOT / folder / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == source


def test_the_package_needs_neither_vllm_nor_torch(wheel: zipfile.ZipFile) -> None:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    required = [line for line in wheel.read(name).decode().splitlines() if line.startswith("Requires-Dist:")]
    assert required, "the metadata has lost its dependencies"
    assert not [line for line in required if line.split()[1].startswith(("vllm", "torch"))]


def test_importing_the_connectors_package_loads_no_engine() -> None:
    assert python(_WATCH, "dcp_connector") == ""


def test_the_modules_outside_the_engines_side_load_no_engine() -> None:
    modules = [f"dcp_connector.{name}" for name in connector_modules() if name not in ENGINE_SIDE]
    assert len(modules) > 10
    assert python(_WATCH, *modules) == ""


def test_no_module_is_longer_than_600_lines() -> None:
    folders = [ROOT / name for name in ("operator", "connector", "devcluster", "tests")]
    lengths = {path: len(path.read_text().splitlines()) for folder in folders for path in folder.rglob("*.py")}
    assert {str(path.relative_to(ROOT)): length for path, length in lengths.items() if length > 600} == {}
