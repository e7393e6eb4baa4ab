"""The contracts of .importlinter name every module that they are about. `make lint` checks the contracts themselves."""

import configparser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: What the operator may import from the connector.
SHARED = {"dcp_connector.config", "dcp_connector.geometry", "dcp_connector.units"}


def contract(name: str, field: str) -> set[str]:
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter")
    return set(parser[f"importlinter:contract:{name}"][field].split())


def modules(package: str) -> set[str]:
    [folder] = [path for path in ROOT.glob(f"*/{package}") if path.is_dir()]
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    folders = {path.name for path in folder.iterdir() if (path / "__init__.py").exists()}
    return {f"{package}.{name}" for name in files | folders}


def test_the_operator_may_not_import_any_other_module_of_the_connector() -> None:
    forbidden = contract("connector-from-operator", "forbidden_modules")
    assert modules("dcp_connector") - SHARED <= forbidden
    assert not SHARED & forbidden


def test_every_contract_is_about_modules_that_exist() -> None:
    known = modules("dcp_operator") | modules("dcp_connector") | {"dcp_operator", "dcp_connector"}
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter")
    for section in parser.sections():
        named = set(parser[section].get("source_modules", "").split())
        assert named <= known, f"{section} names {sorted(named - known)}"
