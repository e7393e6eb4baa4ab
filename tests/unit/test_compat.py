"""What is read from vLLM, and the sentence that ends a start that can't work."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dcp_connector import compat
from dcp_connector.config import SECRET_FILE_ENV
from dcp_connector.errors import StartupError
from dcp_connector.startup import explained
from dcp_connector.transfer import MooncakeTransport
from dcp_connector.wire import Layout


def config(**changes: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 2,
        "cp_kv_cache_interleave_size": 8,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "nnodes": 1,
        "kv_role": "kv_consumer",
        "use_mla": False,
        "kv_heads": 1,
        "extra": {},
        "layers": {"layer": SimpleNamespace(impl=SimpleNamespace(supports_dcp=True))},
        "hidden_size": 64,
        "dtype": "float32",
        "cache_dtype": "auto",
    }
    v = SimpleNamespace(**{**values, **changes})
    return SimpleNamespace(
        parallel_config=v,
        kv_transfer_config=SimpleNamespace(
            engine_id="engine", kv_role=v.kv_role, kv_connector_extra_config=v.extra, is_kv_producer=True
        ),
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(hidden_size=v.hidden_size),
            dtype=v.dtype,
            quantization=None,
            use_mla=v.use_mla,
            served_model_name="tiny",
            model="/models/tiny",
            get_total_num_kv_heads=lambda: v.kv_heads,
        ),
        compilation_config=SimpleNamespace(static_forward_context=v.layers),
        cache_config=SimpleNamespace(cache_dtype=v.cache_dtype),
    )


def spec(kind: str = "FullAttentionSpec", **fields: Any) -> Any:
    """A KV-cache spec of the class that vLLM calls `kind`."""
    return type(kind, (SimpleNamespace,), {})(
        **{"block_size": 32, "dtype": "torch.float32", "dcp_sharded": True} | fields
    )


def layers_of(*specs: Any) -> Any:
    """The spec of a group whose layers have pages of their own sizes."""
    layers = {f"layer.{number}": each for number, each in enumerate(specs)}
    return type("UniformTypeKVCacheSpecs", (SimpleNamespace,), {})(block_size=32, kv_cache_specs=layers)


def cache(groups: int = 1, of: Any = None) -> SimpleNamespace:
    group = SimpleNamespace(kv_cache_spec=of or spec())
    return SimpleNamespace(num_blocks=8, kv_cache_groups=[group] * groups)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.1rc2", "0.32.0+cpu"])
def test_supported_versions_start(version: str) -> None:
    compat.check_version(version, allow_unsupported=False)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.32.0", "dev"])
def test_other_versions_are_refused_with_the_range_unless_the_user_insists(version: str) -> None:
    with pytest.raises(StartupError, match=rf"tested with vLLM 0\.32 and 0\.33, this is {version}"):
        compat.check_version(version, allow_unsupported=False)
    compat.check_version(version, allow_unsupported=True)


def test_every_wrong_option_is_named() -> None:
    with pytest.raises(StartupError) as error:
        compat.read_config(config(extra={"bootstrap_prot": 1, "lease_s": "soon"}))
    assert "bootstrap_prot is 1: Extra inputs are not permitted" in str(error.value)
    assert "lease_s is 'soon': Input should be a valid number" in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is not set: it has to name the file"),
        ("", "can't be read: No such file or directory; mount the secret there"),
        ("  short \n", "has a key of 5 bytes, each needs at least 16"),
    ],
)
def test_a_missing_or_weak_secret_refuses_to_start(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "key"
    if content:
        path.write_text(content)
    environ = {} if content is None else {SECRET_FILE_ENV: str(path)}
    with pytest.raises(StartupError) as error:
        compat.read_secret(environ)
    assert words in str(error.value)


def test_a_secret_is_the_files_content_without_its_line_end(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"0123456789abcdef\n")
    assert compat.read_secret({SECRET_FILE_ENV: str(tmp_path / "key")})() == (b"0123456789abcdef",)


@pytest.mark.parametrize(
    ("changes", "groups", "words"),
    [
        ({"prefill_context_parallel_size": 2}, 1, "prefill context parallel size is 2"),
        ({}, 2, "the model has 2 KV-cache groups"),
    ],
)
def test_what_is_not_served_yet_is_refused_at_the_start(changes: dict[str, Any], groups: int, words: str) -> None:
    with pytest.raises(StartupError) as error:
        compat.check_supported(config(**changes), cache(groups))
    assert words in str(error.value)


@pytest.mark.parametrize("kind", ["FullAttentionSpec", "MLAAttentionSpec"])
def test_full_attention_and_mla_are_served(kind: str) -> None:
    compat.check_supported(config(), cache(of=spec(kind)))


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (spec("SlidingWindowSpec"), "the KV cache is a SlidingWindowSpec; this connector serves"),
        (spec("ChunkedLocalAttentionSpec"), "the KV cache is a ChunkedLocalAttentionSpec"),
        (type("MambaSpec", (), {"block_size": 32})(), "the KV cache is a MambaSpec"),
        (layers_of(spec("MLAAttentionSpec"), spec("MambaSpec")), "the KV cache is a MambaSpec"),
        (
            layers_of(spec(), spec(dcp_sharded=False)),
            "a FullAttentionSpec whose tokens are not dealt out to the 2",
        ),
        (
            type("FullAttentionSpec", (), {"block_size": 32})(),
            "the KV cache is a FullAttentionSpec without a data type",
        ),
        (spec(tokens_per_state=4), "a FullAttentionSpec that keeps 4 tokens in one entry"),
        (spec(dcp_sharded=False), "a FullAttentionSpec whose tokens are not dealt out to the 2"),
    ],
)
def test_a_kv_cache_of_another_kind_is_refused_by_name(of: Any, words: str) -> None:
    with pytest.raises(StartupError) as error:
        compat.check_supported(config(), cache(of=of))
    assert words in str(error.value)


def test_layers_of_unequal_pages_in_one_group_are_served() -> None:
    dtypes = SimpleNamespace(itemsize=2), SimpleNamespace(itemsize=1)
    group = cache(of=layers_of(*(spec("MLAAttentionSpec", dtype=dtype) for dtype in ("torch.uint8", "torch.bfloat16"))))
    compat.check_supported(config(), group)
    assert compat.side_facts(config(), group, ("layer",)).kv_dtype == "bfloat16 and uint8"
    unequal = layers_of(*(spec(dtype=dtype, head_size=128, head_size_v=128) for dtype in dtypes))
    assert compat.side_facts(config(), cache(of=unequal), ("layer",)).key_bytes == 0


def test_without_dcp_it_does_not_matter_whether_the_spec_could_be_sharded() -> None:
    compat.check_supported(config(decode_context_parallel_size=1), cache(of=spec(dcp_sharded=False)))


@pytest.mark.parametrize(
    ("cache_dtype", "torch_dtype", "expected"),
    [
        ("auto", "torch.bfloat16", "bfloat16"),
        ("bfloat16", "torch.bfloat16", "bfloat16"),
        ("fp8", "torch.uint8", "fp8_e4m3"),
        ("fp8_e4m3", "torch.uint8", "fp8_e4m3"),
        ("fp8_e5m2", "torch.uint8", "fp8_e5m2"),
    ],
)
def test_the_kv_dtype_tells_kinds_of_fp8_apart(cache_dtype: str, torch_dtype: str, expected: str) -> None:
    facts = compat.side_facts(config(cache_dtype=cache_dtype), cache(of=spec(dtype=torch_dtype)), ("layer",))
    assert facts.kv_dtype == expected


def test_a_dcp_group_that_would_mix_heads_refuses_to_start() -> None:
    mixed = config(tensor_parallel_size=12, decode_context_parallel_size=4, kv_heads=2)
    with pytest.raises(StartupError, match="can't be served: dcp size 4 doesn't divide the 6 ranks"):
        compat.side_facts(mixed, cache(), ("layer",))


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_pipeline_and_data_parallel_engines_are_served_in_either_role(role: str) -> None:
    compat.check_supported(config(pipeline_parallel_size=2, data_parallel_size=4, kv_role=role), cache())


@pytest.mark.parametrize(("local", "number"), [(None, 0), (0, 0), (3, 3)])
def test_data_parallel_ranks_of_a_pod_are_numbered_from_zero(local: int | None, number: int) -> None:
    assert compat.local_data_parallel_rank(config(data_parallel_rank_local=local)) == number


@pytest.mark.parametrize(("local", "number"), [(0, 1), (1, 1), (4, 4)])
def test_the_first_data_parallel_rank_knows_how_many_the_pod_has(local: int, number: int) -> None:
    assert compat.local_data_parallel_size(config(data_parallel_size_local=local)) == number


@pytest.mark.parametrize(("policy", "recomputes"), [("recompute", True), ("fail", False)])
def test_what_becomes_of_a_request_without_kv_is_vllms_setting(policy: str, *, recomputes: bool) -> None:
    transfer = SimpleNamespace(kv_load_failure_policy=policy)
    assert compat.recomputes(SimpleNamespace(kv_transfer_config=transfer)) is recomputes


@pytest.mark.parametrize(
    ("of", "key_bytes"),
    [
        ({"head_size": 128, "head_size_v": 128}, 256),
        ({"head_size": 192, "head_size_v": 128}, 384),
        ({"head_size": 576, "head_size_v": 0}, 0),
        ({"head_size": 128, "head_size_v": 128, "state_content_bytes": 300}, 0),
        ({}, 0),
    ],
)
def test_only_entries_of_a_plain_key_and_value_can_be_cut(of: dict[str, int], key_bytes: int) -> None:
    dtype = SimpleNamespace(itemsize=2)
    assert compat.side_facts(config(), cache(of=spec(dtype=dtype, **of)), ("layer",)).key_bytes == key_bytes
    opaque = config(layers={"layer": SimpleNamespace(impl=SimpleNamespace())})
    assert compat.side_facts(opaque, cache(of=spec(dtype=dtype, **of)), ("layer",)).key_bytes == 0


def test_facts_are_read_from_the_engines_config() -> None:
    facts = compat.side_facts(config(), cache(), ("layer",))
    assert facts.layout == Layout(2, 2, 8, 32, 1)
    assert (facts.engine_id, facts.role, facts.kv_dtype, facts.page_format) == (
        "engine",
        "kv_consumer",
        "float32",
        "rows",
    )
    assert compat.virtual_block_size(config(), cache()) == 64


def test_the_workers_of_an_engine_on_several_nodes_go_by_the_first_nodes_id(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def broadcast(own: str, src: int) -> str:
        asked.append((own, src))
        return "the first node's"

    group = SimpleNamespace(broadcast_object=broadcast)
    state = SimpleNamespace(get_inner_dp_world_group=lambda: group)
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
    assert compat.side_facts(config(nnodes=2), cache(), ("layer",)).engine_id == "the first node's"
    assert compat.side_facts(config(), cache(), ("layer",)).engine_id == "engine"
    assert asked == [("engine", 0)]


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({"decode_context_parallel_size": 1, "cp_kv_cache_interleave_size": 1}, Layout(2, 1, 32, 32, 1)),
        ({"use_mla": True, "kv_heads": 128}, Layout(2, 2, 8, 32, 1)),
    ],
    ids=["interleave has no effect without DCP", "MLA has one head"],
)
def test_the_layout_is_brought_into_its_normal_form(changes: dict[str, Any], layout: Layout) -> None:
    assert compat.side_facts(config(**changes), cache(), ("layer",)).layout == layout


def test_a_layout_that_mixes_heads_in_a_dcp_group_does_not_start() -> None:
    wrong = config(tensor_parallel_size=12, decode_context_parallel_size=4, kv_heads=2)
    with pytest.raises(StartupError, match="dcp size 4 doesn't divide the 6 ranks that hold each KV head"):
        compat.side_facts(wrong, cache(), ("layer",))


@pytest.mark.parametrize("impl", [None, SimpleNamespace(), SimpleNamespace(supports_dcp=False)])
def test_pages_of_a_backend_that_does_not_promise_rows_are_opaque(impl: object) -> None:
    layers = {"layer": SimpleNamespace(impl=impl)}
    assert compat.side_facts(config(layers=layers), cache(), ("layer",)).page_format == "opaque"


def test_the_model_hash_follows_the_model_and_not_the_parallelism() -> None:
    def hash_of(**changes: Any) -> str:
        return compat.side_facts(config(**changes), cache(), ("layer",)).model_hash

    assert hash_of() == hash_of(tensor_parallel_size=4) == hash_of(kv_role="kv_producer")
    assert len({hash_of(), hash_of(hidden_size=128), hash_of(dtype="bfloat16")}) == 3


@pytest.mark.parametrize(
    ("name", "handed_off"),
    [
        ("FINISHED_STOPPED", True),
        ("FINISHED_LENGTH_CAPPED", True),
        ("FINISHED_REPETITION", True),
        ("FINISHED_ABORTED", False),
        ("FINISHED_IGNORED", False),
        ("FINISHED_ERROR", False),
    ],
)
def test_any_normal_end_hands_the_prompt_off(name: str, handed_off: bool) -> None:
    request = SimpleNamespace(status=SimpleNamespace(name=name))
    assert compat.finished_normally(request) is handed_off


def test_an_unknown_address_refuses_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "0.0.0.0")
    with pytest.raises(StartupError, match="set VLLM_HOST_IP"):
        compat.host_address()


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("libibverbs.so.1: cannot open shared object file", "install libibverbs1, librdmacm1 and ibverbs-providers"),
        ("libcudart.so.12: cannot open shared object file", "for this image's CUDA version"),
        ("No module named 'mooncake'", "install mooncake-transfer-engine"),
    ],
)
def test_a_transfer_engine_that_cannot_be_loaded_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, message: str, hint: str
) -> None:
    def fail(name: str) -> None:
        raise ImportError(message)

    monkeypatch.setattr("dcp_connector.transfer.importlib.import_module", fail)
    with pytest.raises(StartupError) as error:
        MooncakeTransport("127.0.0.1", "rdma", "")
    assert message in str(error.value)
    assert hint in str(error.value)


def test_log_lines_appear_where_vllms_do(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs, handler = logging.Logger("ours"), logging.Logger("vllm", logging.INFO), logging.NullHandler()
    theirs.addHandler(handler)
    loggers = {"dcp_connector": ours, "vllm": theirs}
    monkeypatch.setattr(compat, "logging", SimpleNamespace(getLogger=loggers.__getitem__))
    compat.adopt_logging()
    compat.adopt_logging()
    assert (ours.handlers, ours.level, ours.propagate) == ([handler], logging.INFO, False)


def test_a_start_that_cannot_work_says_why_in_the_pods_status(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    with pytest.raises(StartupError), explained(log):
        raise StartupError("the secret is missing")
    assert log.read_text() == "the secret is missing\n"
    assert "the engine can't start: the secret is missing" in caplog.text


def test_outside_a_container_no_termination_message_is_made(tmp_path: Path) -> None:
    with pytest.raises(StartupError), explained(tmp_path / "absent"):
        raise StartupError("the secret is missing")
    assert list(tmp_path.iterdir()) == []


def test_nothing_but_the_facade_needs_vllm_and_nothing_loads_torch_or_mooncake() -> None:
    folder = Path(compat.__file__).parent
    names = sorted(
        path.stem for path in folder.glob("*.py") if path.stem not in ("_vllm", "connector", "prometheus", "__init__")
    )
    code = (
        "import importlib, sys\n"
        f"for name in {names}: importlib.import_module('dcp_connector.' + name)\n"
        "print([m for m in ('torch', 'vllm', 'mooncake') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
