import pytest

from dcp_operator import names
from dcp_operator.settings import Role


def test_every_name_derived_from_the_longest_allowed_name_fits_into_a_label():
    name = "n" * names.max_name_length()
    derived = [
        *(names.workload(name, component, "0" * names.REVISION_LENGTH) for component in names.COMPONENTS),
        names.router_account(name),
        names.key_secret(name),
        names.public_service(name),
        names.model_job(name, "0" * names.REVISION_LENGTH),
        names.history(name, {}),
        names.engine_policy(name),
        names.router_policy(name),
        *(names.disruption_budget(name, role) for role in Role),
        *(names.scaler(name, role) for role in Role),
    ]
    assert max(map(len, derived)) == names.MAX_LABEL_LENGTH


def test_the_revision_of_a_groups_statefulset_fits_into_a_label_too():
    """LeaderWorkerSet makes a StatefulSet of each group, and Kubernetes labels its pods with NAME-HASH."""
    name = "n" * names.max_name_length(in_groups=True)
    group = f"{names.workload(name, Role.PREFILL, '0' * names.REVISION_LENGTH)}-{9999}"
    assert len(f"{group}-{'0' * 10}") == names.MAX_LABEL_LENGTH


def test_labels_of_an_engine_name_its_role_for_llm_d_too():
    labels = names.labels("chat", Role.DECODE, "abcd0123")
    assert labels[names.LABEL_ROLE] == labels[names.LABEL_LLMD_ROLE] == "decode"
    assert labels[names.LABEL_REVISION] == "abcd0123"
    assert all(type(value) is str for value in labels.values())


def test_a_router_is_no_engine_to_llm_d():
    assert names.LABEL_LLMD_ROLE not in names.labels("chat", names.ROUTER)


def test_the_labels_of_a_pod_contain_its_selector():
    labels = names.labels("chat", "prefill", "abcd0123")
    assert names.selector("chat", "prefill", "abcd0123").items() <= labels.items()
    assert names.selector("chat", "prefill").items() <= labels.items()


def test_a_digest_does_not_depend_on_the_order_of_keys():
    assert names.digest({"a": 1, "b": [1, 2]}) == names.digest({"b": [1, 2], "a": 1})
    assert names.digest({"a": 1, "b": [1, 2]}) != names.digest({"a": 1, "b": [2, 1]})


@pytest.mark.parametrize("length", [8, 16])
def test_a_digest_has_as_many_hex_digits_as_asked_for(length: int):
    digest = names.digest({"a": 1}, length)
    assert len(digest) == length
    assert int(digest, 16) >= 0
