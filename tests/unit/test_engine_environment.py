"""The engine environment: its key, its errors, and that it is there whole or not at all. uv is played by a script."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from devcluster.engine import environment, profile, recipe
from devcluster.errors import DevClusterError
from devcluster.paths import CHECKOUT
from devcluster.settings import ENGINE_MOUNT

# Stands in for `uv venv ... FOLDER` and `uv sync`; the interpreter that it makes writes a model's file.
FAKE_UV = """#!/bin/sh
echo "$1" >> {calls}
for last; do :; done
case "$1" in
venv) mkdir -p "$last/bin" && cp {python} "$last/bin/python3" ;;
sync) mkdir -p "$UV_PROJECT_ENVIRONMENT/lib/python3.11/site-packages" ;;
esac
"""
FAKE_PYTHON = """#!/bin/sh
[ "$1" = -c ] || echo "$4" > "$2/config.json"
"""


@pytest.fixture
def fake_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a script in uv's place, and returns the file that lists how it was called."""
    monkeypatch.setattr(environment, "_DEBIAN_PACKAGES", ())
    python, uv, calls = tmp_path / "python3", tmp_path / "uv", tmp_path / "calls"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    monkeypatch.setattr(environment, "_interpreter", lambda cache: Path(shutil.which("python3") or ""))
    monkeypatch.setenv("UV", str(uv))

    def write(script: str) -> Path:
        uv.write_text(script.format(calls=calls, python=python))
        uv.chmod(0o755)
        calls.write_text("")
        return calls

    return write


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_an_environment_is_made_once(fake_uv: Callable[[str], Path], cache: Path) -> None:
    calls = fake_uv(FAKE_UV)
    first = environment.ensure_engine_environment(cache, print)
    assert first.parent == cache / "engine"
    assert "gc.set_threshold" in (first / "lib/python3.11/site-packages/dcp_engine_startup.pth").read_text()
    assert environment.ensure_engine_environment(cache, print) == first
    assert calls.read_text().split() == ["venv", "sync"]


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        pytest.param(
            "#!/bin/sh\necho 'write: No space left on device (os error 28)'; exit 2", "disk became full", id="disk full"
        ),
        pytest.param(
            "#!/bin/sh\necho 'error: Failed to fetch: `https://index.example/torch/`'; echo; exit 2",
            "package index refused the CPU engine's packages: error: Failed to fetch: `https://index.example/torch/`",
            id="registry refused",
        ),
        pytest.param("#!/bin/sh\necho 'something else'; exit 2", "something else", id="anything else keeps its words"),
    ],
)
def test_a_failed_installation_is_one_sentence_and_leaves_nothing_that_looks_finished(
    fake_uv: Callable[[str], Path], cache: Path, script: str, sentence: str
) -> None:
    fake_uv(script)
    with pytest.raises(DevClusterError) as raised:
        environment.ensure_engine_environment(cache, print)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)
    assert [path for path in (cache / "engine").iterdir() if path.is_dir()] == []


def test_a_disk_that_is_too_small_is_named_before_anything_is_fetched(
    fake_uv: Callable[[str], Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_uv(FAKE_UV)
    monkeypatch.setattr(environment, "NEEDED_BYTES", 10**18)
    with pytest.raises(DevClusterError, match=r"GB are free on the disk of .*DCP_DISAGG_CACHE"):
        environment.ensure_engine_environment(cache, print)
    assert calls.read_text() == ""


def test_models_are_made_once_and_again_when_their_script_has_changed(
    fake_uv: Callable[[str], Path], cache: Path
) -> None:
    fake_uv(FAKE_UV)
    models = environment.ensure_models(cache, print)
    heads = {path.name: (path / "config.json").read_text().strip() for path in models.iterdir() if path.is_dir()}
    assert heads == {"tiny-mqa": "1", "tiny-gqa": "2"}
    (models / "tiny-mqa" / "config.json").unlink()
    environment.ensure_models(cache, print)
    assert not (models / "tiny-mqa" / "config.json").exists(), "a finished model is left alone"
    (models / "tiny-mqa" / "recipe").write_text("of another script")
    environment.ensure_models(cache, print)
    assert (models / "tiny-mqa" / "config.json").is_file()
    assert sorted(path.name for path in models.iterdir() if path.is_dir()) == ["tiny-gqa", "tiny-mqa"]


def test_pruning_keeps_the_environment_in_use(cache: Path) -> None:
    for name in ("aaaa", "bbbb", "cccc"):
        (cache / "engine" / name).mkdir(parents=True)
    kept = cache / "engine" / "bbbb"
    assert [path.name for path in environment.prune(cache, keep=kept)] == ["aaaa", "cccc"]
    assert list((cache / "engine").iterdir()) == [kept]


@pytest.mark.parametrize("changed", ["uv.lock", "pyproject.toml", "plugin module", "plugin pyproject", "interpreter"])
def test_the_key_changes_with_everything_that_decides_the_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    engine, plugin = tmp_path / "devcluster" / "engine", tmp_path / "tests" / "engine_plugin"
    files = {
        "uv.lock": engine / "uv.lock",
        "pyproject.toml": engine / "pyproject.toml",
        "plugin module": plugin / "src" / "p" / "a.py",
        "plugin pyproject": plugin / "pyproject.toml",
    }
    for file in files.values():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("one")
    monkeypatch.setattr(recipe, "ENGINE_FOLDER", engine)
    monkeypatch.setattr(recipe, "PLUGIN_FOLDER", plugin)
    python = Path("/usr/bin/python3.11")
    before = recipe.environment_key(python, "3.11.2")
    assert recipe.environment_key(python, "3.11.2") == before
    if changed == "interpreter":
        assert recipe.environment_key(python, "3.11.9") != before
        assert recipe.environment_key(Path("/opt/python3.11"), "3.11.2") != before
    else:
        files[changed].write_text("two")
        assert recipe.environment_key(python, "3.11.2") != before


def test_neighbouring_contents_are_kept_apart() -> None:
    assert recipe.content_key({"a": b"bc"}) != recipe.content_key({"ab": b"c"})


def test_an_engine_without_dcp_gets_no_flag_of_dcp() -> None:
    plain = profile.arguments("m", served_model_name="m", host="h", port=1)
    assert not [flag for flag in plain if "context" in flag or "interleave" in flag]
    split = profile.arguments("m", served_model_name="m", host="h", port=1, tensor=4, dcp=2, interleave=8)
    assert {"--tensor-parallel-size=4", "--decode-context-parallel-size=2", "--cp-kv-cache-interleave-size=8"} <= set(
        split
    )


def test_the_model_inspection_of_a_pod_is_found_where_the_pod_sees_the_environment() -> None:
    assert profile.environment("/opt/cpu-engine")["VLLM_CACHE_ROOT"] == "/opt/cpu-engine/vllm-cache"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_demo_runs_its_engines_as_the_profile_says(role: str) -> None:
    """Except for what is a field of the object: the operator renders --dtype and the like, and HF_HUB_OFFLINE."""
    spec = yaml.safe_load((CHECKOUT / "examples" / "cpu-demo.yaml").read_text())["spec"][role]
    fields = {"--dtype=float32": "dtype", "--block-size=32": "blockSize", "--max-model-len=2048": "maxModelLen"}
    assert spec["extraArgs"] == [flag for flag in profile.ARGUMENTS if flag not in fields]
    assert [flag for flag, field in fields.items() if flag.partition("=")[2] != str(spec[field])] == []
    (main,) = spec["template"]["spec"]["containers"]
    expected = profile.environment(ENGINE_MOUNT)
    del expected["HF_HUB_OFFLINE"]
    assert {variable["name"]: variable["value"] for variable in main["env"]} == expected
    assert main["command"] == [f"{ENGINE_MOUNT}/bin/python3", "-m", profile.API_SERVER]
