"""The model catalogue: what is in it, how it is looked up, and what a file of an installation does to it."""

import asyncio
import json
import re
from importlib.resources import files

import pytest

from dcp_operator.catalogue import Catalogue, builtin, read_entries
from dcp_operator.catalogue_file import CatalogueFile, from_environment
from tests.support.specimens import role, sizes, violations, warnings

CONTENT = json.loads(files("dcp_operator.catalogue").joinpath("models.json").read_text(encoding="utf-8"))
#: One of every family that the product names, with attention heads, KV heads and layers as their publishers state them.
FAMILIES = {
    "deepseek-ai/DeepSeek-V2-Lite": ("mla", 16, 1, 27),
    "deepseek-ai/DeepSeek-V3": ("mla", 128, 1, 61),
    "deepseek-ai/DeepSeek-R1": ("mla", 128, 1, 61),
    "moonshotai/Kimi-K2-Instruct": ("mla", 64, 1, 61),
    "zai-org/GLM-4.5-Air": ("gqa", 96, 8, 46),
    "Qwen/Qwen2.5-72B-Instruct": ("gqa", 64, 8, 80),
    "Qwen/Qwen3-32B": ("gqa", 64, 8, 64),
    "Qwen/Qwen3-235B-A22B": ("gqa", 64, 4, 94),
    "meta-llama/Llama-3.1-8B-Instruct": ("gqa", 32, 8, 32),
    "meta-llama/Llama-3.3-70B-Instruct": ("gqa", 64, 8, 80),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": ("gqa", 40, 8, 48),
    "mistralai/Mixtral-8x22B-Instruct-v0.1": ("gqa", 48, 8, 56),
    "openai/gpt-oss-120b": ("gqa", 64, 8, 36),
    "microsoft/phi-4": ("gqa", 40, 10, 40),
    "google/gemma-3-27b-it": ("gqa", 32, 16, 62),
    "Qwen/Qwen3.5-397B-A17B": ("gqa", 32, 2, 60),
    "01-ai/Yi-1.5-34B-Chat": ("gqa", 56, 8, 60),
    "CohereForAI/c4ai-command-r-08-2024": ("gqa", 64, 8, 40),
    "ibm-granite/granite-3.2-2b-instruct": ("gqa", 32, 8, 40),
    "MiniMaxAI/MiniMax-M2.5": ("gqa", 48, 8, 62),
}
OWN = {"names": ["acme/big"], "attention": "gqa", "attentionHeads": 32, "kvHeads": 4, "layers": 12, "headSize": 128}


class TestBuiltIn:
    @pytest.mark.parametrize("row", CONTENT["models"], ids=lambda row: row["names"][0])
    def test_every_entry_is_valid_and_says_where_it_is_from(self, row: dict):
        models, problems = read_entries({"models": [row]})
        assert problems == []
        source, _, where = models[0].source.partition(": ")
        assert source in CONTENT["sources"]
        assert where.strip()
        if source == "huggingface":
            assert re.fullmatch(r"https://huggingface\.co/\S+config\.json\S*|https://huggingface\.co/\S+\.diff", where)

    def test_at_least_forty_models_are_known(self):
        assert len(builtin().models) >= 40

    def test_no_name_is_given_twice(self):
        names = [name.casefold() for model in builtin().models for name in model.names]
        assert len(names) == len(set(names))

    @pytest.mark.parametrize(("name", "facts"), FAMILIES.items())
    def test_models_of_every_family_have_their_publishers_numbers(self, name: str, facts: tuple):
        model = builtin().lookup(f"hf://{name}")
        assert model is not None
        shape = model.geometry
        assert (shape.attention, shape.attention_heads, shape.kv_heads, shape.layers) == facts

    @pytest.mark.parametrize(
        ("name", "layout"),
        [
            ("Qwen/Qwen3-32B", "full"),
            ("deepseek-ai/DeepSeek-V3.2", "sparse"),
            ("openai/gpt-oss-120b", "sliding"),
            ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "chunked"),
            ("Qwen/Qwen3.5-397B-A17B", "linear"),
        ],
    )
    def test_models_whose_layers_drop_tokens_are_told_from_those_that_keep_all(self, name: str, layout: str):
        model = builtin().lookup(name)
        assert model is not None
        assert model.geometry.layout == layout
        assert model.keeps_every_token is (layout in ("full", "sparse"))

    def test_a_context_length_that_only_a_training_config_states_is_left_out(self):
        for row in CONTENT["models"]:
            if row["source"].startswith("litgpt") and row["names"][0].startswith("Qwen/Qwen2.5"):
                assert "maxModelLen" not in row


class TestLookup:
    def test_the_case_of_letters_and_the_scheme_do_not_matter(self):
        assert builtin().lookup("DEEPSEEK-AI/deepseek-v3") is builtin().lookup("hf://deepseek-ai/DeepSeek-V3")

    @pytest.mark.parametrize("uri", ["hf://acme/tiny", "pvc://models/deepseek-ai/DeepSeek-V3", "oci://x", ""])
    def test_what_is_not_listed_is_not_known(self, uri: str):
        assert builtin().lookup(uri) is None

    def test_an_added_model_is_found_by_its_whole_uri_too(self):
        models, problems = read_entries({"models": [{**OWN, "names": ["pvc://models/big"]}]})
        assert problems == []
        catalogue = builtin().with_models(models)
        assert catalogue.lookup("pvc://models/big") is models[0]

    def test_an_added_model_overrides_one_of_the_same_name(self):
        models, _ = read_entries({"models": [{**OWN, "names": ["Qwen/Qwen3-32B"]}]})
        catalogue = builtin().with_models(models)
        found = catalogue.lookup("hf://Qwen/Qwen3-32B")
        assert found is not None
        assert found.layers == 12
        assert catalogue.lookup("hf://Qwen/Qwen3-32B-FP8") is builtin().lookup("hf://Qwen/Qwen3-32B-FP8")


WRONG = {
    "no map": ([OWN], "found a list, must be a map with a list of models under the key models"),
    "no list": ({"models": OWN}, "found a map, must be a map with a list of models under the key models"),
    "another key": ({"models": [], "model": 1}, "model: is not a key of a catalogue; its only key is models"),
    "no entry": ({"models": [3]}, "models[0]: found a whole number, must be a map; the entry is left out"),
    "a text as number": (
        {"models": [{**OWN, "layers": "12"}]},
        'models[0].layers: found "12", which should be a valid integer; the entry is left out',
    ),
    "no heads": (
        {"models": [{key: value for key, value in OWN.items() if key != "kvHeads"}]},
        "models[0].kvHeads: is required; the entry is left out",
    ),
    "heads that do not divide": (
        {"models": [{**OWN, "kvHeads": 3}]},
        "models[0]: kvHeads 3 must divide attentionHeads 32; the entry is left out",
    ),
    "a latent model with many heads": (
        {"models": [{**OWN, "attention": "mla"}]},
        "models[0]: kvHeads must be 1 with attention mla, which caches one compressed head; the entry is left out",
    ),
    "a latent model without its rank": (
        {"models": [{**OWN, "attention": "mla", "kvHeads": 1}]},
        "models[0]: kvLoraRank and qkRopeHeadDim are required with attention mla; the entry is left out",
    ),
    "no head size": (
        {"models": [{**OWN, "headSize": None}]},
        "models[0]: headSize is required with attention gqa; the entry is left out",
    ),
    "a misspelt field": (
        {"models": [{**OWN, "heads": 3}]},
        "models[0].heads: is not a field of a model; its fields are names, attention, attentionHeads, kvHeads, layers,",
    ),
    "no name": ({"models": [{**OWN, "names": []}]}, "models[0].names: is empty; the entry is left out"),
    "too many": ({"models": [OWN] * 5001}, "models: has 5001 entries, at most 5000 are allowed"),
}


@pytest.mark.parametrize(("content", "sentence"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_with_a_file_is_a_sentence(content: object, sentence: str):
    _, problems = read_entries(content)
    assert len(problems) == 1
    assert problems[0].startswith(sentence)


def test_a_wrong_entry_leaves_the_others_alone():
    models, problems = read_entries({"models": [{"names": 3}, OWN]})
    assert [model.names for model in models] == [["acme/big"]]
    assert len(problems) == 1


class TestFile:
    def test_without_a_file_only_the_built_in_models_are_known(self):
        assert from_environment("  ").catalogue is builtin()

    def test_its_models_are_known_at_once_and_after_every_change(self, tmp_path):
        path = tmp_path / "models.yaml"
        path.write_text(json.dumps({"models": [OWN]}))
        file = from_environment(str(path))
        assert _layers(file.catalogue) == 12
        path.write_text(
            "models:\n- {names: [acme/big], attention: gqa, attentionHeads: 8, kvHeads: 1, layers: 3, headSize: 64}"
        )
        assert file.refresh()
        assert _layers(file.catalogue) == 3
        assert not file.refresh()

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"a: [", "is no YAML: "),
            (b"\xff\xfe\x00", "is no YAML: "),
            (b"[" * 100_000, "is no YAML: "),
            (b"# " + b"x" * (1 << 20), "is larger than 1048576 bytes; only the built-in models are known"),
            (b"hello", "found a string, must be a map with a list of models"),
            (b"models:\n- 3", "models[0]: found a whole number, must be a map"),
        ],
    )
    def test_a_broken_file_is_reported_in_words_and_ignored(self, tmp_path, caplog, content: bytes, said: str):
        path = tmp_path / "models.yaml"
        path.write_text(json.dumps({"models": [OWN]}))
        file = from_environment(str(path))
        path.write_bytes(content)
        assert file.refresh()
        assert said in caplog.text
        assert "Traceback" not in caplog.text
        assert _layers(file.catalogue) is None
        assert file.catalogue.lookup("deepseek-ai/DeepSeek-V3") is not None

    def test_a_missing_file_is_reported_once(self, tmp_path, caplog):
        file = from_environment(str(tmp_path / "missing"))
        assert not file.refresh()
        assert caplog.text.count("can't be read: No such file or directory; only the built-in models are known") == 1

    def test_a_change_is_told_to_who_asked(self, tmp_path, monkeypatch):
        monkeypatch.setattr("dcp_operator.catalogue_file._POLL_S", 0.01)
        path = tmp_path / "models.yaml"
        path.write_text("models: []")
        file = CatalogueFile(path)

        async def watch() -> Catalogue:
            told: asyncio.Future[Catalogue] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(file.keep_fresh(told.set_result))
            try:
                return await asyncio.wait_for(told, 20)
            finally:
                task.cancel()

        path.write_text(json.dumps({"models": [OWN]}))
        assert _layers(asyncio.run(watch())) == 12


def _layers(catalogue: Catalogue) -> int | None:
    model = catalogue.lookup("acme/big")
    return None if model is None else model.layers


KNOWN = {"spec": {"model": {"uri": "hf://Qwen/Qwen3-32B", "geometry": None}}}


class TestRules:
    """The rules know the catalogue's models as if the object had stated their numbers."""

    def test_a_known_model_needs_no_geometry(self):
        assert not [line for line in warnings(KNOWN) if "[unknown-model]" in line]
        (line,) = violations(KNOWN, sizes("decode", tensor=3, decodeContext=1))
        assert "does not divide the catalogue's attentionHeads 64" in line
        assert "[heads-divide-tp]" in line

    def test_what_the_object_states_goes_before_the_catalogue(self):
        stated = {"attention": "gqa", "attentionHeads": 6, "kvHeads": 3, "layers": 2}
        change = {"spec": {"model": {"uri": "hf://Qwen/Qwen3-32B", "geometry": stated}}}
        assert not [
            line for line in violations(change, sizes("prefill", tensor=3)) if "spec.prefill.parallelism.tensor" in line
        ]

    def test_a_longer_context_than_the_catalogues_is_a_warning_because_overrides_can_go_beyond_it(self):
        longer = (role("prefill", maxModelLen=131072), role("decode", maxModelLen=131072))
        fitting = sizes("decode", tensor=8, decodeContext=1)
        assert violations(KNOWN, fitting, *longer) == []
        said = [line for line in warnings(KNOWN, fitting, *longer) if "[max-model-len]" in line]
        assert len(said) == 2
        assert "131072 is above the catalogue's maxModelLen 40960" in said[0]
