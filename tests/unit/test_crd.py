"""The generated CustomResourceDefinition."""

import json
import re
from pathlib import Path

import pytest
import yaml

from dcp_operator.api.cel import cel_rules
from dcp_operator.api.crd import crd, crds, scaler_crd
from dcp_operator.rules import rule_ids

VERSION = crd()["spec"]["versions"][0]
SCALER = scaler_crd()["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]


def walk(schema, path=()):
    """Yield every field of a schema with its path."""
    for name, field in schema.get("properties", {}).items():
        yield (*path, name), field
        yield from walk(field, (*path, name))
    if "properties" in schema.get("items", {}):
        yield from walk(schema["items"], path)


FIELDS = {".".join(path): field for path, field in walk(SCHEMA) if path != ("metadata",)}


SCALER_FIELDS = {
    ".".join(path): field for path, field in walk(SCALER["schema"]["openAPIV3Schema"]) if path != ("metadata",)
}
DEFINITIONS = {definition["metadata"]["name"]: definition for definition in crds()}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_file_is_current(name):
    assert yaml.safe_load(Path(f"crds/{name}.yaml").read_text()) == DEFINITIONS[name], "run `make generate`"


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_described(field):
    assert len(FIELDS[field].get("description", "")) >= 5


@pytest.mark.parametrize("field", SCALER_FIELDS)
def test_every_field_of_a_scaler_is_described(field):
    assert len(SCALER_FIELDS[field].get("description", "")) >= 5


def test_the_schemas_are_structural():
    text = json.dumps(list(DEFINITIONS.values()))
    for forbidden in ('"$ref"', '"$defs"', '"additionalProperties"', '"title"', '"const"', '"null"', '"oneOf"'):
        assert forbidden not in text
    for path, field in (*FIELDS.items(), *SCALER_FIELDS.items()):
        assert "type" in field or field.get("x-kubernetes-int-or-string"), path


def test_autoscalers_find_what_they_need_in_a_scaler():
    scale = SCALER["subresources"]["scale"]
    assert scale["specReplicasPath"] == ".spec.replicas"
    assert {path.lstrip(".") for path in scale.values()} <= SCALER_FIELDS.keys()
    replicas = SCALER_FIELDS["spec.replicas"]
    assert (replicas["minimum"], replicas["maximum"], "default" in replicas) == (0, 1000, False)
    assert SCALER["schema"]["openAPIV3Schema"]["properties"]["spec"]["required"] == ["replicas"]


def test_only_numbers_or_strings_are_unions():
    unions = [path for path, field in FIELDS.items() if "anyOf" in field]
    assert unions == [
        "spec.prefill.disruptionBudget.maxUnavailable",
        "spec.decode.disruptionBudget.maxUnavailable",
        "spec.rolloutStrategy.maxSurge",
        "spec.rolloutStrategy.maxUnavailable",
        "spec.rolloutStrategy.maxSkew",
    ]


def test_free_form_maps_keep_what_they_hold():
    kept = [path for path, field in FIELDS.items() if field.get("x-kubernetes-preserve-unknown-fields")]
    assert kept == [
        "spec.kvConnector.extraConfig",
        "spec.prefill.multinode.annotations",
        "spec.prefill.template",
        "spec.decode.multinode.annotations",
        "spec.decode.template",
        "spec.router.template",
    ]


def test_maps_of_defaults_are_filled_in_themselves():
    for path in (
        "spec.decode.parallelism",
        "spec.kvConnector",
        "spec.router",
        "spec.rolloutStrategy",
        "spec.accelerator",
    ):
        assert FIELDS[path]["default"] == {}, path
    for path in ("spec.decode", "spec.model", "spec.model.geometry", "spec.decode.scaling", "spec.ratio"):
        assert "default" not in FIELDS[path], path


def test_status_has_no_defaults():
    assert [path for path, field in FIELDS.items() if path.startswith("status") and "default" in field] == []


def test_conditions_are_merged_by_type():
    conditions = FIELDS["status.conditions"]
    assert (conditions["x-kubernetes-list-type"], conditions["x-kubernetes-list-map-keys"]) == ("map", ["type"])


def test_names_and_columns():
    assert crd()["spec"]["names"]["shortNames"] == ["dcpd"]
    assert crd()["spec"]["names"]["categories"] == ["all"]
    columns = [column["name"] for column in VERSION["additionalPrinterColumns"]]
    assert columns == ["Model", "Ready", "Prefill", "Decode", "TP/DCP", "Reason", "Age"]


def test_every_column_shows_a_field_that_exists():
    for version, fields in ((VERSION, FIELDS), (SCALER, SCALER_FIELDS)):
        for column in version["additionalPrinterColumns"]:
            path = column["jsonPath"].lstrip(".").split("[")[0]
            assert path in fields or path == "metadata.creationTimestamp", column["name"]


def test_cel_rules_carry_ids_of_the_rule_engine():
    for rule in cel_rules():
        for text in (rule["message"], rule.get("messageExpression", rule["message"])):
            assert any(f"[{rule_id}]" in text for rule_id in rule_ids()), text
        assert "\n" not in rule["rule"]


def test_cel_rules_point_at_fields_that_exist():
    for rule in cel_rules():
        assert f"spec{rule['fieldPath']}" in FIELDS


def test_every_cel_rule_says_its_sentence_with_its_path_and_its_id():
    for rule in cel_rules():
        path, rule_id = f"spec{rule['fieldPath']}: ", rule["message"].rpartition("[")[2]
        assert rule["message"].startswith(path)
        said = rule.get("messageExpression", path)
        assert path in said
        assert rule_id in said or said == path


def test_every_cel_rule_lets_an_update_pass_that_leaves_alone_what_it_reads():
    for rule in cel_rules():
        assert rule["optionalOldSelf"] is True
        holds, _, unchanged = rule["rule"].partition(" || (oldSelf.hasValue() && ")
        read = set(re.findall(r"self((?:\.[a-zA-Z]+(?![a-zA-Z(]))+)", re.sub(r"\bhas\([^)]*\)", "", holds)))
        assert read or holds.count("has(") == 2, "two fields of which only one may be there"
        for path in read:
            assert f"self{path} == oldSelf.value(){path}" in unchanged, (path, rule["message"])
