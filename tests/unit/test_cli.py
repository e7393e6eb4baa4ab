"""dcpctl as a user runs it: real processes, real files, real pipes."""

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dcp_operator.cli.yaml_io import YamlError, read_documents
from tests.support.specimens import role, sizes, specimen

DCPCTL = Path(sys.executable).with_name("dcpctl")
REFUSED_LINE = (
    "spec.decode.parallelism.decodeContext: 3 does not divide spec.decode.parallelism.tensor 8; nearest that works: 2 "
    "[dcp-divides-tp]"
)
REFUSED = sizes("decode", tensor=8, decodeContext=3)
WARNED = role("prefill", kvCacheInterleaveSize=32)


def dcpctl(*arguments, stdin="", program=DCPCTL):
    result = subprocess.run(
        [program, *map(str, arguments)], input=stdin, capture_output=True, text=True, check=False, timeout=120
    )
    assert "Traceback" not in result.stderr, result.stderr
    return result


def text_of(*bodies):
    return yaml.safe_dump_all(bodies)


@pytest.fixture
def objects(tmp_path):
    """A folder with an allowed, a warned and a refused object, an object of another kind, and a text."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.yaml").write_text(text_of(specimen(), {"apiVersion": "v1", "kind": "ConfigMap"}))
    (tmp_path / "b.json").write_text(json.dumps(specimen(WARNED, {"metadata": {"name": "warned"}})))
    (tmp_path / "sub" / "c.yml").write_text(text_of(specimen(REFUSED, {"metadata": {"name": "refused"}})))
    (tmp_path / "README.md").write_text("# no object")
    return tmp_path


class TestValidate:
    def test_allowed_object_exits_with_0(self):
        result = dcpctl("validate", "-f", "-", stdin=text_of(specimen()))
        assert (result.returncode, result.stdout, result.stderr) == (0, "-: models/chat is allowed\n", "")

    def test_refused_object_exits_with_1_and_says_why(self):
        result = dcpctl("validate", "-f", "-", stdin=text_of(specimen(REFUSED)))
        assert result.returncode == 1
        assert result.stdout == f"-: models/chat is refused (1 error)\n  error: {REFUSED_LINE}\n"

    def test_warnings_are_shown_and_allowed(self):
        result = dcpctl("validate", "-f", "-", stdin=text_of(specimen(WARNED)))
        assert result.returncode == 0
        assert result.stdout.startswith("-: models/chat is allowed (1 warning)\n  warning: spec.prefill.kvCacheInter")

    def test_folders_are_read_with_their_subfolders_and_other_kinds_passed_over(self, objects):
        result = dcpctl("validate", "-f", objects)
        assert result.returncode == 1
        assert [line for line in result.stdout.splitlines() if not line.startswith(" ")] == [
            f"{objects}/a.yaml: models/chat is allowed",
            f"{objects}/b.json: models/warned is allowed (1 warning)",
            f"{objects}/sub/c.yml: models/refused is refused (1 error)",
        ]
        assert result.stderr == "passed over 1 object of other kinds: ConfigMap\n"

    def test_json_is_one_line_per_object(self, objects):
        result = dcpctl("validate", "-f", objects, "-o", "json")
        verdicts = [json.loads(line) for line in result.stdout.splitlines()]
        assert [(each["name"], each["allowed"]) for each in verdicts] == [
            ("chat", True),
            ("warned", True),
            ("refused", False),
        ]
        assert verdicts[2] == {
            "file": f"{objects}/sub/c.yml",
            "name": "refused",
            "namespace": "models",
            "allowed": False,
            "violations": [
                {
                    "rule": "dcp-divides-tp",
                    "path": "spec.decode.parallelism.decodeContext",
                    "message": "3 does not divide spec.decode.parallelism.tensor 8; nearest that works: 2",
                }
            ],
            "warnings": [],
        }
        assert [each["rule"] for each in verdicts[1]["warnings"]] == ["interleave-needs-dcp"]

    def test_the_list_that_kubectl_get_prints_is_read(self):
        items = {"apiVersion": "v1", "kind": "List", "items": [specimen(), specimen(REFUSED)]}
        result = dcpctl("validate", "-f", "-", stdin=text_of(items))
        assert result.stdout.count("models/chat is") == 2
        assert result.returncode == 1

    def test_a_schema_error_is_a_refusal(self):
        result = dcpctl("validate", "-f", "-", stdin=text_of(specimen(role("decode", blockSize=0))))
        assert result.returncode == 1
        assert "spec.decode.blockSize: found 0, must be at least 1 [schema]" in result.stdout

    def test_only_other_kinds_is_allowed_with_a_note(self):
        result = dcpctl("validate", "-f", "-", stdin="apiVersion: v1\nkind: Secret\n")
        assert (result.returncode, result.stdout) == (0, "")
        assert result.stderr == "passed over 1 object of other kinds: Secret\nfound no DCPDisaggDeployment\n"

    def test_unreadable_wins_over_refused_and_the_rest_is_still_checked(self, objects):
        (objects / "broken.yaml").write_text("a: [")
        result = dcpctl("validate", "-f", objects)
        assert result.returncode == 2
        assert "models/refused is refused" in result.stdout
        assert f"{objects}/broken.yaml: is no YAML at line " in result.stderr


UNREADABLE = {
    "broken YAML": ("a: [1\nb: 2", "-: is no YAML at line 2, column 2: "),
    "a key given twice": ("a: 1\nb: 2\na: 3", "-: is no YAML at line 3, column 1: the key a is given twice"),
    "a text": ("hello", "-: holds no object of Kubernetes but a str"),
    "nesting without end": ("[" * 100_000, "-: is no YAML at line 1, column "),
    "nesting of a thousand levels": ("[" * 900 + "]" * 900, "-: is nested more than 100 levels deep, too deep for "),
    "a loop": ("a: &a [*a]", "-: is nested more than 100 levels deep, too deep for an object of Kubernetes"),
    "a bomb of aliases": (
        "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"a{i + 1}: &a{i + 1} [{','.join([f'*a{i}'] * 10)}]\n" for i in range(9)),
        "-: expands to more than 500000 values, too many for an object of Kubernetes",
    ),
    "bytes": ("a: !!binary aGk=", "-: holds a bytes, which JSON has no form for"),
    "an object of Python": ("a: !!python/object:os.system {}", "-: is no YAML at line 1, column 4: could not "),
}


@pytest.mark.parametrize(("text", "message"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_unreadable_input_is_one_sentence_and_exit_2(text, message):
    result = dcpctl("validate", "-f", "-", stdin=text)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


FILES = {
    "a missing file": ("missing.yaml", "can't be read: No such file or directory"),
    "a binary file": (sys.executable, "is no text in UTF-8"),
    "an empty folder": (".", "the folder holds no .yaml, .yml or .json file"),
}


@pytest.mark.parametrize(("name", "message"), FILES.values(), ids=FILES.keys())
def test_unreadable_files_are_one_sentence_and_exit_2(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    result = dcpctl("validate", "-f", name)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


class TestOutput:
    def test_a_reader_that_leaves_early_does_not_change_the_verdict(self):
        many = text_of(*[specimen(REFUSED, {"metadata": {"name": f"chat-{number}"}}) for number in range(1500)])
        process = subprocess.Popen(
            [DCPCTL, "validate", "-f", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdin.write(many)
        process.stdin.close()
        assert "is refused" in process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        process.stderr.close()
        assert (process.wait(timeout=60), errors) == (1, "")

    @pytest.mark.parametrize(("change", "code"), [({}, 0), (REFUSED, 1)])
    def test_without_stdout_only_the_exit_code_is_given(self, tmp_path, change, code):
        (tmp_path / "a.yaml").write_text(text_of(specimen(change)))
        command = f"{DCPCTL} validate -f {tmp_path}/a.yaml >&-"
        result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        assert (result.returncode, result.stderr) == (code, "")

    def test_a_full_disk_is_one_sentence(self, tmp_path):
        (tmp_path / "a.yaml").write_text(text_of(specimen()))
        command = [DCPCTL, "validate", "-f", tmp_path / "a.yaml"]
        with Path("/dev/full").open("w") as full:
            result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert result.returncode == 2
        assert result.stderr == "dcpctl: the output can't be written: No space left on device\n"


class TestRender:
    def test_prints_every_manifest(self):
        result = dcpctl("render", "-f", "-", stdin=text_of(specimen()))
        assert result.returncode == 0
        manifests = list(yaml.safe_load_all(result.stdout))
        kinds = [manifest["kind"] for manifest in manifests]
        assert kinds.count("Deployment") == 3
        assert {"Secret", "Service"} <= set(kinds)
        assert {manifest["metadata"]["namespace"] for manifest in manifests} == {"models"}

    def test_the_operator_image_can_be_given(self):
        result = dcpctl("render", "-f", "-", "--operator-image", "reg.example/op:7", stdin=text_of(specimen()))
        assert "reg.example/op:7" in result.stdout

    def test_a_refused_object_is_not_rendered(self):
        result = dcpctl("render", "-f", "-", stdin=text_of(specimen(REFUSED)))
        assert (result.returncode, result.stdout) == (1, "")
        assert REFUSED_LINE in result.stderr

    def test_an_object_without_a_name_is_one_sentence(self):
        body = specimen({"metadata": {"name": "", "generateName": "chat-"}})
        result = dcpctl("render", "-f", "-", stdin=text_of(body))
        assert result.returncode == 2
        assert "has no metadata.name, from which all names are made" in result.stderr

    def test_nothing_to_render_is_an_error(self):
        assert dcpctl("render", "-f", "-", stdin="").returncode == 2


def test_crds_prints_the_files_that_are_checked_in():
    names = ("dcpdisaggdeployments", "dcpdisaggrolescalers")
    assert dcpctl("crds").stdout == "---\n".join(Path(f"crds/{name}.dcpdisagg.io.yaml").read_text() for name in names)


class TestExplain:
    def test_one_rule(self):
        text = dcpctl("explain", "gqa-dcp-replicas").stdout
        assert text.startswith("gqa-dcp-replicas\n\nWith grouped-query attention, ")

    def test_all_rules(self):
        lines = dcpctl("explain").stdout.splitlines()
        assert [line for line in lines if line.startswith("dcp-divides-tp ")]
        assert len(lines) > 25

    def test_an_unknown_rule_names_the_nearest(self):
        result = dcpctl("explain", "dcp-divide-tp")
        assert (result.returncode, result.stderr) == (
            2,
            "dcpctl: there is no rule dcp-divide-tp; did you mean dcp-divides-tp?\n",
        )


class TestHelmAndHooks:
    HELM = """---
# Source: app/templates/service.yaml
apiVersion: v1
kind: Service
metadata: {name: a}
---
# Source: app/templates/empty.yaml
---
"""

    def test_the_output_of_helm_is_read_with_other_kinds_counted(self):
        result = dcpctl("validate", "-f", "-", stdin=f"{self.HELM}{text_of(specimen())}{self.HELM}")
        assert (result.returncode, result.stdout) == (0, "-: models/chat is allowed\n")
        assert result.stderr == "passed over 2 objects of other kinds: Service\n"

    def test_the_pre_commit_hook_runs_as_pre_commit_calls_it(self, objects):
        (hook,) = yaml.safe_load(Path(".pre-commit-hooks.yaml").read_text())
        entry = shlex.split(hook["entry"])
        files = sorted(str(path) for path in objects.rglob("*") if re.search(hook["files"], path.name))
        command = [DCPCTL.with_name(entry[0]), *entry[1:], *files]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 1
        assert "models/refused is refused" in result.stdout
        assert len(files) == 3

    def test_a_catalogue_file_makes_its_models_known(self, tmp_path):
        manifest = specimen()
        manifest["spec"]["model"] = {"uri": "hf://acme/big"}
        (tmp_path / "a.yaml").write_text(text_of(manifest))
        model = {
            "names": ["acme/big"],
            "attention": "gqa",
            "attentionHeads": 32,
            "kvHeads": 4,
            "layers": 2,
            "headSize": 64,
        }
        (tmp_path / "models.yaml").write_text(text_of({"models": [model]}))
        assert "unknown-model" in dcpctl("validate", tmp_path / "a.yaml").stdout
        known = dcpctl("validate", tmp_path / "a.yaml", "--catalogue", tmp_path / "models.yaml")
        assert known.stdout == f"{tmp_path}/a.yaml: models/chat is allowed\n"
        (tmp_path / "models.yaml").write_text("models: 3")
        broken = dcpctl("validate", tmp_path / "a.yaml", "--catalogue", tmp_path / "models.yaml")
        assert (broken.returncode, broken.stderr) == (
            2,
            f"dcpctl: {tmp_path}/models.yaml: found a map, must be a map with a list of models under the key models\n",
        )


@functools.cache
def completion_script(shell: str) -> str:
    return dcpctl("completion", shell).stdout


class TestCompletion:
    def complete(self, *words: str) -> set[str]:
        """What bash offers for the last of the words."""
        script = completion_script("bash")
        typed = " ".join(map(shlex.quote, ("dcpctl", *words)))
        code = f'{script}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words)}; _dcpctl; echo "${{COMPREPLY[@]}}"'
        return set(subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split())

    def test_bash_completes_commands_options_and_values(self):
        assert self.complete("val") == {"validate"}
        assert self.complete("validate", "--su") == {"--suggest"}
        assert self.complete("validate", "-o", "s") == {"sarif"}
        assert {"dcp-divides-tp", "dcp-advice"} <= self.complete("explain", "dcp-")
        assert self.complete("validate", "-f", "x") == set()
        assert self.complete("rollout", "un") == {"undo"}
        assert self.complete("rollout", "undo", "chat", "--to") == {"--to-revision"}
        assert self.complete("rollout", "undo", "chat", "--dry-run", "c") == {"client"}

    @pytest.mark.parametrize("shell", ["zsh", "fish"])
    def test_other_shells_get_every_command_and_option(self, shell):
        script = completion_script(shell)
        for word in (
            "validate",
            "plan",
            "kv-plan",
            "completion",
            "gpu-memory",
            "suggest",
            "dcp-divides-tp",
            "sarif",
            "undo",
        ):
            assert word in script


class TestProgram:
    def test_version(self):
        assert dcpctl("--version").stdout.startswith("dcpctl 0.")

    def test_as_kubectl_plugin(self):
        program = DCPCTL.with_name("kubectl-dcpd")
        assert dcpctl("--version", program=program).stdout.startswith("kubectl dcpd 0.")
        assert "usage: kubectl dcpd validate" in dcpctl("validate", "--help", program=program).stdout

    def test_as_module(self):
        command = [sys.executable, "-m", "dcp_operator", "validate", "-f", "-"]
        result = subprocess.run(command, input=text_of(specimen()), capture_output=True, text=True, check=False)
        assert result.returncode == 0

    def test_without_a_file_it_says_how_to_name_one(self):
        for command in ("validate", "render"):
            result = dcpctl(command)
            assert (result.returncode, result.stderr) == (
                2,
                "dcpctl: no file is named; use -f FILE, and -f - for stdin\n",
            )

    def test_wrong_calls_exit_with_2(self):
        for arguments in ([], ["nonsense"], ["validate", "-f", "x", "-o", "xml"]):
            assert dcpctl(*arguments).returncode == 2

    def test_loads_neither_kopf_nor_the_kubernetes_client(self):
        modules = "validate, dcp_operator.cli.render, dcp_operator.cli.plan, dcp_operator.cli.sarif"
        code = f"import sys, dcp_operator.cli.{modules}; print(*sys.modules)"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert {"kopf", "kubernetes", "aiohttp", "numpy", "asyncio"} & set(result.stdout.split()) == set()

    def test_help_loads_no_rules(self):
        code = (
            "import sys, dcp_operator.cli\ntry: dcp_operator.cli.main(['-h'])\nexcept SystemExit: print(*sys.modules)"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert {"pydantic", "yaml", "dcp_operator.rules", "dcp_operator.api"} & set(result.stdout.split()) == set()

    def test_works_without_a_home_and_a_cluster(self, tmp_path):
        (tmp_path / "a.yaml").write_text(text_of(specimen()))
        command = [DCPCTL, "validate", "-f", tmp_path / "a.yaml"]
        environment = {"PATH": os.environ["PATH"]}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0


class TestYaml:
    """What Kubernetes' YAML means by a scalar, where PyYAML alone means something else."""

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("2020-01-01", "2020-01-01"),
            ("12:30", "12:30"),
            ("8080:80", "8080:80"),
            ("010", 8),
            ("0x10", 16),
            ("1_000", 1000),
            ("1e3", 1000.0),
            ("1.5", 1.5),
            ("yes", True),
            ("~", None),
        ],
    )
    def test_scalars(self, text, value):
        assert list(read_documents(f"a: {text}")) == [{"a": value}]

    def test_keys_are_strings(self):
        assert list(read_documents("{1: a, null: b}\n---\n{true: c}")) == [{"1": "a", "null": "b"}, {"true": "c"}]

    def test_merge_keys_are_no_repeated_keys(self):
        assert list(read_documents("a: &a {x: 1}\nb: {<<: *a, x: 2}")) == [{"a": {"x": 1}, "b": {"x": 2}}]

    def test_control_characters_are_no_yaml(self):
        with pytest.raises(YamlError, match="is no YAML"):
            list(read_documents("a: \x00"))
