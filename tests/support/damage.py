"""Objects and reviews that are damaged at random: what an API server, or somebody else, may send to the webhook."""

import copy
from typing import Any

from hypothesis import strategies as st

from tests.support.specimens import specimen
from tests.support.webhook_process import review

TEXTS = st.text(max_size=12) | st.sampled_from(
    ["", "main", "--tensor-parallel-size=8", "-tp", "--", "-", "8", "hf://a/b", "\u202e", "\ud800", "null", "25%", "{"]
)
NUMBERS = st.integers(-3, 9) | st.sampled_from([0, 2**31, 2**63, -1, 10**40]) | st.floats(allow_nan=True)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8
)

#: The object that is damaged: everything that a rule or a template looks at is in it.
WHOLE = specimen(
    {
        "metadata": {"labels": {"a": "b"}, "uid": "u", "generation": 1},
        "spec": {
            "router": {"replicas": 1, "template": {"spec": {"containers": [{"name": "main", "env": []}]}}},
            "rolloutStrategy": {"maxSurge": "25%", "maxUnavailable": 0},
            "kvConnector": {"type": "mooncake", "extraConfig": {"lease_s": 30}, "delivery": "Inject"},
            "accelerator": {"resourceName": "nvidia.com/gpu"},
            "prefill": {
                "extraArgs": ["--max-num-seqs=64", "-tp", "4", '--override-generation-config={"a": 1}'],
                "template": {
                    "metadata": {"labels": {"x": "y"}},
                    "spec": {
                        "terminationGracePeriodSeconds": 600,
                        "hostNetwork": False,
                        "containers": [
                            {
                                "name": "main",
                                "env": [{"name": "PYTHONPATH", "value": "/x"}],
                                "resources": {"limits": {"nvidia.com/gpu": 4}},
                                "ports": [{"containerPort": 9}],
                                "volumeMounts": [{"name": "v", "mountPath": "/v"}],
                            }
                        ],
                        "volumes": [{"name": "v", "emptyDir": {}}],
                    },
                },
            },
            "decode": {"kvCacheInterleaveSize": 32, "blockSize": 64},
        },
    }
)


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Every place in a document, the document itself left out."""
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in steps for place in ((*path, key), *places(inner, (*path, key)))]


def damaged(document: Any, damage: list[tuple[tuple, Any]]) -> Any:
    """The document with values put at places, as far as the places are still there."""
    result = copy.deepcopy(document)
    for path, value in damage:
        holder = result
        try:
            for step in path[:-1]:
                holder = holder[step]
            holder[path[-1]] = value
        except (KeyError, IndexError, TypeError):
            continue
    return result


REVIEW_PLACES = places(review(None))
OBJECT_PLACES = places(WHOLE)

#: Places in an object with what is put there.
DAMAGE = st.lists(st.tuples(st.sampled_from(OBJECT_PLACES), VALUES), min_size=1, max_size=4)
#: The same for a whole review.
REVIEW_DAMAGE = st.lists(st.tuples(st.sampled_from(REVIEW_PLACES), VALUES), min_size=1, max_size=3)
