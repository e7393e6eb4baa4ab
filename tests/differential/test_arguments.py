"""Arguments in `extraArgs` that repeat or contradict typed fields, in every spelling, and what the engine makes of it.

An object that is taken runs with the sizes that its fields state. One that is refused for a contradiction would not.
"""

from dataclasses import asdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_operator.api.load import load_spec
from dcp_operator.flags import known_flags
from dcp_operator.settings import Role, resolve_role
from tests.support.differences import MLA, sides
from tests.support.profiles import examples
from tests.support.specimens import merged
from tests.support.verdicts import verdicts

#: A decode role with every size stated.
STATED = {
    "tensor": 8,
    "decodeContext": 2,
    "blockSize": 64,
    "kvCacheInterleaveSize": 16,
    "maxModelLen": 8192,
    "dtype": "bfloat16",
    "kvCacheDtype": "bfloat16",
}
#: Flag -> values, some of which say the same as the field.
VALUES = {
    "--tensor-parallel-size": ("8", "4", "16", " 8"),
    "--decode-context-parallel-size": ("2", "1", "4"),
    "--block-size": ("64", "32", "6_4"),
    "--cp-kv-cache-interleave-size": ("16", "64", "1"),
    "--max-model-len": ("8192", "8K", "8.192k", "4k", "8k"),
    "--dtype": ("bfloat16", "float16", "half"),
    "--pipeline-parallel-size": ("1", "2"),
    "--data-parallel-size": ("1", "2"),
    "--enable-expert-parallel": (),
}
#: Settings that an engine's own configuration has too.
COMPARED = ("tensor", "pipeline", "data", "expert", "decode_context", "prefill_context", "interleave", "block_size")
COMPARED += ("max_model_len", "dtype", "kv_cache_dtype")
FORMATS = {"bfloat16": "torch.bfloat16", "float16": "torch.float16"}


@st.composite
def uses(draw, version):
    """One use of a flag: any of its names, shortened or with underscores, with = or apart."""
    known = known_flags(version)
    canonical = draw(st.sampled_from(sorted(VALUES)))
    name = draw(st.sampled_from(known.by_name[canonical].names))
    if name.startswith("--"):
        unique = [size for size in range(3, len(name)) if known.matching(name[:size]) == [name]]
        name = name[: draw(st.sampled_from([*unique, len(name)]))]
        name = "--" + name[2:].replace("-", draw(st.sampled_from("-_")))
    if not VALUES[canonical]:
        return [name]
    value = draw(st.sampled_from(VALUES[canonical]))
    return [f"{name}={value}"] if draw(st.booleans()) else [name, value]


@pytest.mark.timeout(1800)  # many examples, on a machine that may be doing other things
@pytest.mark.parametrize("version", ["0.32", "0.33"])
@settings(max_examples=examples(dev=150, ci=400), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_an_engine_runs_with_what_the_fields_say_or_the_object_is_refused(version, data):
    line = [word for use in data.draw(st.lists(uses(version), min_size=1, max_size=3)) for word in use]
    body = sides({"maxModelLen": 8192, "dtype": "bfloat16", "kvCacheDtype": "bfloat16"}, STATED, MLA, version=version)
    body = merged(body, {"spec": {"decode": {"extraArgs": line}}})
    said = verdicts(body)
    if not said.rules:
        assert not said.refused_at_run_time, said
        assert runs_with(said) == stated(body)
    else:
        assert said.rules == {"extra-args-contradict"}
        assert said.refused_at_run_time or runs_with(said) != stated(body), said


def runs_with(said):
    return said.facts["decode"]


def stated(body):
    """Return what the operator reckons with, in the engine's words."""
    spec = load_spec(body)
    assert spec is not None
    sizes = asdict(resolve_role(spec, Role.DECODE))
    sizes |= {name: FORMATS[sizes[name]] for name in ("dtype", "kv_cache_dtype")}
    return {name: str(value) for name, value in sizes.items() if name in COMPARED}
