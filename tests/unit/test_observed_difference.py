import pytest

from dcp_operator.difference import first_difference

SAME = {
    "an added field": ({"a": 1}, {"a": 1, "b": 2}),
    "a default inside a container": (
        {"containers": [{"name": "main", "image": "i"}]},
        {"containers": [{"name": "main", "image": "i", "terminationMessagePath": "/dev/termination-log"}]},
    ),
    "a container that somebody injected": (
        {"containers": [{"name": "main"}]},
        {"containers": [{"name": "injected"}, {"name": "main"}]},
    ),
    "a quantity written another way": (
        {"resources": {"limits": {"cpu": "0.5", "memory": "1024Mi"}}},
        {"resources": {"limits": {"cpu": "500m", "memory": "1Gi"}}},
    ),
    "a quantity given as a number": ({"limits": {"nvidia.com/gpu": 8}}, {"limits": {"nvidia.com/gpu": "8"}}),
    "an empty value that is not stored": (
        {"env": [{"name": "A", "value": ""}], "args": [], "metadata": {}, "x": None},
        {"env": [{"name": "A"}]},
    ),
    "a false that is not stored": ({"hostNetwork": False}, {}),
    "an emptyDir without a field": (
        {"volumes": [{"name": "v", "emptyDir": {}}]},
        {"volumes": [{"name": "v", "emptyDir": {}}]},
    ),
    "the ports of a service": (
        {"ports": [{"port": 80, "targetPort": "http"}]},
        {"ports": [{"port": 80, "targetPort": "http", "nodePort": 30000}]},
    ),
}

DIFFERENT = {
    "a changed value": ({"spec": {"replicas": 2}}, {"spec": {"replicas": 3}}, "spec.replicas"),
    "a removed field": ({"metadata": {"labels": {"a": "b"}}}, {"metadata": {}}, "metadata.labels"),
    "a key that was added to a service's selector": (
        {"spec": {"selector": {"app": "a"}}},
        {"spec": {"selector": {"app": "a", "other": "b"}}},
        "spec.selector",
    ),
    "a removed container": ({"containers": [{"name": "main"}]}, {"containers": []}, "containers[main]"),
    "a changed argument": ({"args": ["a", "b"]}, {"args": ["a", "c"]}, "args[1]"),
    "an argument more": ({"args": ["a"]}, {"args": ["a", "b"]}, "args"),
    "another quantity": ({"limits": {"cpu": "1"}}, {"limits": {"cpu": "2"}}, "limits.cpu"),
    "a variable": (
        {"env": [{"name": "A", "value": "1"}]},
        {"env": [{"name": "A", "value": "2"}]},
        "env[A].value",
    ),
    "a number that only looks equal": ({"a": 1}, {"a": True}, "a"),
    "a false that must be stored": ({"automountServiceAccountToken": False}, {}, "automountServiceAccountToken"),
    "a string that looks like a quantity": (
        {"env": [{"name": "N", "value": "1000m"}]},
        {"env": [{"name": "N", "value": "1"}]},
        "env[N].value",
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_it_is_no_difference(case: str):
    desired, live = SAME[case]
    assert first_difference(desired, live) is None


@pytest.mark.parametrize("case", DIFFERENT)
def test_it_is_a_difference_and_its_path_is_named(case: str):
    desired, live, path = DIFFERENT[case]
    assert first_difference(desired, live) == path
