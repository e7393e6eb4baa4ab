"""dcpctl validate for machines: JSON with suggestions, SARIF, annotations of GitHub Actions, and lines of files."""

import json
import re
from pathlib import Path

import pytest
import yaml

from dcp_operator.cli.positions import Positions
from dcp_operator.cli.problems import CliError
from dcp_operator.cli.validate import validate
from dcp_operator.rules import check_body, rule_ids
from tests.support.specimens import role, sizes, specimen

REFUSED = specimen(sizes("decode", tensor=8, decodeContext=3), {"metadata": {"name": "refused"}})
WARNED = specimen(role("prefill", kvCacheInterleaveSize=32), {"metadata": {"name": "warned"}})
TEXT = """\
# Source: chart/templates/a.yaml
apiVersion: v1
kind: ConfigMap
---
---
apiVersion: dcpdisagg.io/v1alpha1
kind: DCPDisaggDeployment
metadata: {name: chat, namespace: models}
spec:
  model:
    uri: hf://example/model
    geometry: {attention: gqa, attentionHeads: 32, kvHeads: 4, layers: 32}
  image: vllm/vllm-openai:v0.33.0
  kvConnector: {protocol: tcp}
  prefill:
    parallelism:
      tensor: 4
  decode:
    parallelism:
      tensor: 8
      decodeContext: 3
    extraArgs:
    - --max-num-seqs=64
    - --port=1
    template:
      spec:
        containers:
        - name: side
        - name: main
          env:
          - name: A
            value: "1"
"""


@pytest.fixture
def file(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("sub dir").mkdir()
    path = Path("sub dir/all.yaml")
    path.write_text(TEXT)
    return str(path)


class TestPositions:
    @pytest.mark.parametrize(
        ("path", "line"),
        [
            ("spec.decode.parallelism.decodeContext", 21),
            ("spec.decode.extraArgs[1]", 24),
            ("spec.decode.template.spec.containers[main].env[A].value", 32),
            ("spec.decode.template.spec.containers[1].env", 30),
            ("spec.model.geometry.kvHeads", 12),
            ("spec.decode.blockSize", 18),
            ("spec.decode.template.spec.containers[main].resources.limits", 29),
            ("metadata.name", 8),
            ("kind", 7),
            ("nothing.there", 6),
            ("spec.decode.extraArgs[9]", 22),
        ],
    )
    def test_a_path_leads_to_the_line_of_the_field_or_of_what_is_nearest_above(self, path: str, line: int):
        assert Positions(TEXT).line(2, None, path) == line

    def test_an_object_in_a_list_is_found_by_its_position(self):
        text = yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [specimen(), REFUSED]}, sort_keys=False)
        line = Positions(text).line(0, 1, "spec.decode.parallelism.decodeContext")
        assert text.splitlines()[line - 1].strip() == "decodeContext: 3"

    def test_json_has_lines_too(self):
        text = json.dumps(REFUSED, indent=1)
        line = Positions(text).line(0, None, "spec.decode.parallelism.decodeContext")
        assert text.splitlines()[line - 1].strip() == '"decodeContext": 3'


class TestSarif:
    """Structure by the specification; no validator of its schema is among the project's dependencies."""

    def log(self, *files: str) -> dict:
        outcome = validate(files, output="sarif")
        return json.loads(outcome.out)

    def test_every_finding_is_a_result_at_its_line(self, file: str):
        log = self.log(file)
        assert (log["version"], log["$schema"]) == ("2.1.0", "https://json.schemastore.org/sarif-2.1.0.json")
        (run,) = log["runs"]
        found = {
            (result["ruleId"], result["level"]): result["locations"][0]["physicalLocation"] for result in run["results"]
        }
        place = found["dcp-divides-tp", "error"]
        assert place == {"artifactLocation": {"uri": "sub%20dir/all.yaml"}, "region": {"startLine": 21}}
        assert found["connector-args", "error"]["region"]["startLine"] == 24

    def test_results_point_at_the_rules_that_the_log_describes(self, file: str):
        (run,) = self.log(file)["runs"]
        driver = run["tool"]["driver"]
        assert driver["name"] == "dcpctl"
        assert driver["rules"]
        for result in run["results"]:
            assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
            assert result["level"] in ("error", "warning", "note", "none")
            assert result["message"]["text"].startswith("spec.")
        for rule in driver["rules"]:
            assert rule["id"] in rule_ids()
            assert rule["shortDescription"]["text"]
            assert rule["help"]["text"].count("\n") > 2

    def test_a_file_that_cannot_be_read_makes_the_run_unsuccessful(self, tmp_path):
        (tmp_path / "broken.yaml").write_text("a: [")
        (run,) = self.log(str(tmp_path / "broken.yaml"))["runs"]
        (invocation,) = run["invocations"]
        assert invocation["executionSuccessful"] is False
        assert "is no YAML" in invocation["toolExecutionNotifications"][0]["message"]["text"]
        assert run["results"] == []

    def test_files_outside_of_the_working_directory_are_whole_uris(self, tmp_path, monkeypatch):
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        (tmp_path / "there.yaml").write_text(yaml.safe_dump(REFUSED))
        (run,) = self.log(str(tmp_path / "there.yaml"))["runs"]
        uri = run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        assert uri == (tmp_path / "there.yaml").as_uri()

    def test_no_findings_are_a_log_with_no_results(self, tmp_path):
        (tmp_path / "good.yaml").write_text(yaml.safe_dump(specimen()))
        (run,) = self.log(str(tmp_path / "good.yaml"))["runs"]
        assert run["results"] == []
        assert run["invocations"][0]["executionSuccessful"]


class TestAnnotations:
    def test_every_finding_is_a_workflow_command_on_one_line(self, file: str):
        outcome = validate([file], output="github")
        assert outcome.code == 1
        lines = outcome.out.splitlines()
        pattern = re.compile(r"::(error|warning) file=sub dir/all\.yaml,line=\d+,title=[a-z0-9-]+::\S+: spec\..+")
        assert all(pattern.fullmatch(line) for line in lines)
        assert any(line.startswith("::error file=sub dir/all.yaml,line=21,title=dcp-divides-tp::") for line in lines)

    def test_what_the_runner_would_misread_is_escaped(self, tmp_path):
        odd = tmp_path / "a,b:c%.yaml"
        odd.write_text(yaml.safe_dump(specimen(sizes("decode", tensor=8, decodeContext=3))))
        line = validate([str(odd)], output="github").out
        assert "a%2Cb%3Ac%25.yaml,line=" in line

    def test_a_file_that_cannot_be_read_is_an_error(self, tmp_path):
        outcome = validate([str(tmp_path / "missing.yaml")], output="github")
        assert outcome.code == 2
        assert outcome.out.startswith("::error title=unreadable::")


class TestSuggest:
    def documents(self, outcome) -> list[dict]:
        return list(yaml.safe_load_all(outcome.out))

    def test_a_refused_object_is_printed_with_the_change_that_makes_it_allowed(self, tmp_path):
        (tmp_path / "a.yaml").write_text(yaml.safe_dump(REFUSED))
        outcome = validate([str(tmp_path / "a.yaml")], output="text", suggest=True)
        assert outcome.code == 1
        (changed,) = self.documents(outcome)
        assert changed["spec"]["decode"]["parallelism"]["decodeContext"] in (1, 2, 4)
        assert check_body(changed).allowed
        assert re.search(r"^# spec\.decode\.parallelism\.\w+: set to \d+$", outcome.out, re.MULTILINE)
        assert any("[dcp-divides-tp]" in note for note in outcome.notes)

    def test_an_allowed_object_is_printed_as_it_is(self, tmp_path):
        (tmp_path / "a.yaml").write_text(yaml.safe_dump(WARNED))
        outcome = validate([str(tmp_path / "a.yaml")], output="text", suggest=True)
        assert outcome.code == 0
        assert self.documents(outcome) == [WARNED]
        assert "#" not in outcome.out

    def test_json_names_the_changes(self, tmp_path):
        (tmp_path / "a.yaml").write_text(yaml.safe_dump_all([REFUSED, specimen()]))
        outcome = validate([str(tmp_path / "a.yaml")], output="json", suggest=True)
        refused, allowed = (json.loads(line) for line in outcome.out.splitlines())
        assert allowed["suggestion"] == []
        assert [set(change) for change in refused["suggestion"]] == [{"path", "value"}]

    def test_what_no_change_makes_allowed_is_said(self, tmp_path):
        (tmp_path / "a.yaml").write_text(yaml.safe_dump(specimen(role("decode", blockSize="x"))))
        outcome = validate([str(tmp_path / "a.yaml")], output="text", suggest=True)
        assert (outcome.code, outcome.out) == (1, "")
        assert outcome.notes[-1].strip().startswith("no small change makes it allowed")

    @pytest.mark.parametrize("output", ["sarif", "github"])
    def test_other_outputs_hold_no_objects(self, tmp_path, output: str):
        (tmp_path / "a.yaml").write_text(yaml.safe_dump(REFUSED))
        with pytest.raises(CliError, match="--suggest prints objects"):
            validate([str(tmp_path / "a.yaml")], output=output, suggest=True)
