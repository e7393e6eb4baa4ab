"""Derived engine settings."""

from dcp_operator.settings import Role, resolve, resolve_role
from tests.support.specimens import loaded, role, sizes


def test_the_interleave_is_the_block_unless_stated():
    spec = loaded(role("prefill", blockSize=32), role("decode", blockSize=32, kvCacheInterleaveSize=8)).spec
    assert [settings.interleave for settings in resolve(spec).values()] == [32, 8]


def test_the_length_is_the_models_unless_stated():
    spec = loaded(role("decode", maxModelLen=1000)).spec
    assert [settings.max_model_len for settings in resolve(spec).values()] == [32768, 1000]


def test_accelerators_are_the_ranks_of_one_pod():
    spec = loaded(sizes("decode", tensor=4, prefillContext=2, pipeline=3, data=4, dataLocal=2, decodeContext=8)).spec
    settings = resolve_role(spec, Role.DECODE)
    assert (settings.ranks_per_pod, settings.accelerators_per_pod) == (48, 48)


def test_all_data_ranks_are_local_unless_stated():
    assert resolve_role(loaded(sizes("decode", data=4)).spec, Role.DECODE).data_local == 4


def test_engines_on_cpu_need_no_accelerator():
    spec = loaded({"spec": {"accelerator": {"resourceName": "cpu"}}}).spec
    assert resolve_role(spec, Role.DECODE).accelerators_per_pod == 0
