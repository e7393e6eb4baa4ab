import copy

import pytest

from dcp_operator.build.merge import TemplateError, merge


def test_neither_argument_is_changed():
    base = {"spec": {"containers": [{"name": "main", "env": [{"name": "A", "value": "1"}]}]}}
    over = {"spec": {"containers": [{"name": "main", "env": [{"name": "A", "value": "2"}]}]}}
    before = copy.deepcopy((base, over))
    merge(base, over)
    assert (base, over) == before


def test_containers_merge_by_name_and_keep_their_order():
    base = {"containers": [{"name": "main", "image": "a", "command": ["x"]}, {"name": "side", "image": "b"}]}
    over = {"containers": [{"name": "new", "image": "c"}, {"name": "main", "image": "d"}]}
    assert merge(base, over)["containers"] == [
        {"name": "main", "image": "d", "command": ["x"]},
        {"name": "side", "image": "b"},
        {"name": "new", "image": "c"},
    ]


def test_a_variable_is_replaced_as_a_whole_so_that_value_and_value_from_never_meet():
    base = {"env": [{"name": "A", "value": "1"}]}
    over = {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]}
    assert merge(base, over)["env"] == over["env"]


def test_a_volume_is_replaced_as_a_whole_so_that_it_has_one_source():
    base = {"volumes": [{"name": "dshm", "emptyDir": {"medium": "Memory"}}]}
    over = {"volumes": [{"name": "dshm", "persistentVolumeClaim": {"claimName": "c"}}]}
    assert merge(base, over)["volumes"] == over["volumes"]


def test_a_probe_with_another_handler_drops_the_handler_before_it():
    base = {"readinessProbe": {"httpGet": {"path": "/"}, "periodSeconds": 5}}
    over = {"readinessProbe": {"exec": {"command": ["true"]}}}
    assert merge(base, over)["readinessProbe"] == {"exec": {"command": ["true"]}, "periodSeconds": 5}


def test_plain_lists_are_replaced():
    assert merge({"command": ["a", "b"]}, {"command": ["c"]}) == {"command": ["c"]}


def test_null_leaves_the_base_as_it_is():
    assert merge({"a": 1}, {"a": None}) == {"a": 1}


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"containers": "main"}, "template.containers: expected a list, found 'main'"),
        ({"containers": [{"image": "x"}]}, "template.containers[0]: expected a mapping with the key name, found"),
        ({"containers": [3]}, "template.containers[0]: expected a mapping with the key name, found 3"),
        ({"metadata": "x"}, "template.metadata: expected a mapping, found 'x'"),
    ],
)
def test_a_template_of_another_shape_is_refused_with_its_path(over: dict, message: str):
    with pytest.raises(TemplateError) as refusal:
        merge({"metadata": {"labels": {}}, "containers": [{"name": "main"}]}, over)
    assert str(refusal.value).startswith(message)
