"""The CustomResourceDefinition on the real API server: what it takes, what it refuses, and in which words.

Every request is a dry run: the webhook may or may not be there, and the schema and its CEL rules answer before it.
"""

import json
import random
import re
from collections.abc import Iterator

import pytest

from dcp_operator.api.cel import cel_rules
from dcp_operator.api.crd import crd
from dcp_operator.api.load import load
from dcp_operator.rules import check_body, pod_fields
from tests.support.cluster import Cluster, cluster
from tests.support.operator_process import install_crd
from tests.support.release import eventually, kubectl
from tests.support.specimens import MLA, merged, role, sizes, specimen

SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
STATIC_RULES = sorted({re.findall(r"\[([a-z-]+)\]", rule["message"])[-1] for rule in cel_rules()})


def nodes(schema: dict, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict]]:
    """Yield every map of the schema with the path under which kubectl explain knows it."""
    yield path, schema
    for name, field in schema["properties"].items():
        inner = field.get("items", field)
        if "properties" in inner:
            yield from nodes(inner, (*path, name))


NODES = list(nodes(SCHEMA))


@pytest.fixture(scope="module")
def real() -> Cluster:
    found = cluster()
    install_crd(found)
    return found


@pytest.fixture(scope="module")
def namespace(real: Cluster) -> Iterator[str]:
    with real.namespace("crd") as name:
        yield name


@pytest.fixture
def send(namespace: str):
    """Send objects to the API server without storing them; return exit code, what it would store, what it said."""

    def create(*bodies: dict) -> tuple[int, str, str]:
        items = [merged(body, {"metadata": {"namespace": namespace}}) for body in bodies]
        document = items[0] if len(items) == 1 else {"apiVersion": "v1", "kind": "List", "items": items}
        command = ["create", "--dry-run=server", "--output", "json", "--filename", "-"]
        result = kubectl(*command, stdin=json.dumps(document), check=False)
        return result.returncode, result.stdout, result.stderr

    return create


def words(text: str) -> str:
    return " ".join(text.split())


def undescribed(path: tuple[str, ...], schema: dict) -> list[str]:
    """Return the fields of a map of which kubectl explain doesn't say what the schema says."""
    text = words(kubectl("explain", ".".join(("dcpd", *path)), check=False).stdout)
    # The API server describes these itself.
    own = () if path else ("apiVersion", "kind", "metadata")
    fields = {name: field for name, field in schema["properties"].items() if name not in own}
    return [name for name, field in fields.items() if name not in text or words(field["description"]) not in text]


@pytest.mark.usefixtures("real")
@pytest.mark.parametrize(("path", "schema"), NODES, ids=[".".join(path) or "object" for path, _ in NODES])
def test_kubectl_explain_describes_every_field(path, schema):
    # The API server brings its description of a definition up to date some seconds after the definition.
    eventually(f"kubectl explain describes {path}", lambda: undescribed(path, schema) == [], within_s=30.0)


def test_the_server_fills_in_the_defaults_that_the_models_have(send):
    body = specimen()
    code, out, err = send(body)
    assert code == 0, err
    stored = json.loads(out)["spec"]
    loaded = load(body)
    assert loaded.obj is not None
    ours = loaded.obj.spec.model_dump(by_alias=True, exclude_none=True)
    for free_form in (ours["kvConnector"], ours["prefill"], ours["decode"], ours["router"]):
        for name in ("extraConfig", "template", "extraArgs"):
            if free_form.get(name) in ({}, []):
                del free_form[name]
    assert stored == ours


def test_an_object_that_was_read_back_is_the_same_to_the_rules(send):
    body = specimen(sizes("decode", tensor=8, decodeContext=2), role("decode", template={"spec": {"volumes": None}}))
    code, out, err = send(body)
    assert code == 0, err
    again = load(json.loads(out))
    assert again.findings == ()
    assert again.obj is not None
    first = load(body).obj
    assert first is not None
    assert again.obj.spec == first.spec


REFUSED = {
    "an unknown field": (role("decode", blockSiz=64), 'unknown field "spec.decode.blockSiz"'),
    "an unknown field deep inside": (
        {"spec": {"model": {"geometry": {"head": 1}}}},
        'unknown field "spec.model.geometry.head"',
    ),
    "a number as a string": (role("decode", blockSize="64"), "spec.decode.blockSize: Invalid value"),
    "a string as a map": ({"spec": {"model": "hf://a/b"}}, "spec.model: Invalid value"),
    "a list as a map": (role("decode", parallelism=[8]), "spec.decode.parallelism: Invalid value"),
    "zero": (
        role("decode", parallelism={"tensor": 0}),
        (
            "spec.decode.parallelism.tensor: Invalid value: 0: spec.decode.parallelism.tensor in body should be "
            "greater than "
            "or equal to 1"
        ),
    ),
    "a negative size": (
        role("decode", blockSize=-64),
        "spec.decode.blockSize: Invalid value: -64: spec.decode.blockSize in body should be greater than or equal to 1",
    ),
    "a huge size": (
        role("decode", parallelism={"tensor": 100_000}),
        "spec.decode.parallelism.tensor in body should be less than or equal to 1024",
    ),
    "a number beyond 64 bits": (role("decode", blockSize=2**70), "spec.decode.blockSize"),
    "a connector that there is not": (
        {"spec": {"kvConnector": {"type": "lmcache"}}},
        'Unsupported value: "lmcache": supported values: "mooncake", "mooncake-upstream", "nixl"',
    ),
    "a ratio that is none": ({"spec": {"ratio": {"min": "half"}}}, "spec.ratio.min in body should match"),
    "a word that is no choice": (
        {"spec": {"kvConnector": {"protocol": "nvlink"}}},
        'spec.kvConnector.protocol: Unsupported value: "nvlink": supported values: "rdma", "tcp"',
    ),
    "an unknown scheme": ({"spec": {"model": {"uri": "s3://bucket/model"}}}, "spec.model.uri in body should match"),
    "an empty image": ({"spec": {"image": ""}}, "spec.image in body should match"),
    "a surge that is no percentage": (
        {"spec": {"rolloutStrategy": {"maxSurge": "lots"}}},
        "spec.rolloutStrategy.maxSurge in body should match",
    ),
    "a negative surge": ({"spec": {"rolloutStrategy": {"maxSurge": -1}}}, "spec.rolloutStrategy.maxSurge"),
    "a role left out": ({"spec": {"decode": None}}, "spec.decode: Required value"),
    "no spec": ({"spec": None}, "spec: Required value"),
    "too many arguments": (role("decode", extraArgs=["x"] * 300), "spec.decode.extraArgs: Too many: 300"),
    "a name in letters that DNS lacks": ({"metadata": {"name": "größe"}}, "metadata.name: Invalid value"),
    "a name of 254 characters": ({"metadata": {"name": "a" * 254}}, "metadata.name: Invalid value"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_the_schema_refuses(send, change, message):
    code, _, err = send(specimen(change))
    assert code == 1
    assert message in err
    assert "Traceback" not in err


def test_an_object_beyond_what_the_server_takes_is_refused(send):
    code, _, err = send(specimen(role("decode", template={"metadata": {"annotations": {"a": "x" * 4_000_000}}})))
    assert code == 1
    assert "too large" in err


def test_an_object_of_a_megabyte_is_answered(send):
    code, _, err = send(specimen(role("decode", template={"metadata": {"annotations": {"a": "x" * 1_000_000}}})))
    assert code == 0 or "spec.decode.template" in err, err[:500]


NIXL = {"spec": {"kvConnector": {"type": "nixl"}}}
UPSTREAM = {"spec": {"kvConnector": {"type": "mooncake-upstream"}, "router": {"replicas": 0}}}

STATIC = {
    "dcp-divides-tp": [MLA, sizes("decode", tensor=8, decodeContext=3)],
    "dcp-divides-tp, one suggestion": [MLA, sizes("decode", tensor=8, decodeContext=9)],
    "dcp-divides-tp, suggestions that suit the heads": [sizes("decode", tensor=16, decodeContext=3)],
    "dcp-divides-tp, heads that allow only 1": [sizes("decode", tensor=4, decodeContext=3)],
    "dcp-divides-tp, heads unknown": [
        {"spec": {"model": {"geometry": None}}},
        sizes("decode", tensor=12, decodeContext=5),
    ],
    "dcp-divides-tp, large sizes": [MLA, sizes("prefill", tensor=1000, decodeContext=300)],
    "dcp-divides-tp, a model that can't be sharded": [
        {"spec": {"model": {"geometry": {"layout": "sliding"}}}},
        *(role(name, extraArgs=["--disable-hybrid-kv-cache-manager"]) for name in ("prefill", "decode")),
        sizes("decode", tensor=8, decodeContext=3),
    ],
    "pcp-dcp-sizes": [MLA, sizes("decode", tensor=4, prefillContext=2, decodeContext=3)],
    "pcp-dcp-sizes, beside data": [MLA, sizes("decode", tensor=4, prefillContext=2, decodeContext=2, data=2)],
    "geometry-consistent": [{"spec": {"model": {"geometry": {"kvHeads": 5}}}}],
    "geometry-consistent, latent attention": [MLA, {"spec": {"model": {"geometry": {"kvHeads": 8}}}}],
    "data-local-fits-data": [sizes("decode", data=4, dataLocal=3)],
    "data-local-fits-data, ranks outside the pod": [sizes("decode", data=4, dataLocal=2)],
    "max-model-len, a model of unknown length": [
        {"spec": {"model": {"geometry": {"maxModelLen": None}}}},
        role("prefill", maxModelLen=2048),
        role("decode", maxModelLen=1024),
    ],
    "max-model-len": [role("prefill", maxModelLen=2048), role("decode", maxModelLen=1024)],
    "connector-takes-pair": [sizes("decode", prefillContext=2)],
    "connector-takes-pair, part of the ranks": [MLA, NIXL, sizes("decode", tensor=8, decodeContext=2)],
    "connector-takes-pair, blocks that differ": [
        MLA,
        NIXL,
        sizes("decode", decodeContext=1),
        role("decode", blockSize=32),
    ],
    "connector-takes-pair, sizes that don't divide": [
        MLA,
        NIXL,
        sizes("prefill", tensor=6),
        sizes("decode", tensor=4, decodeContext=1),
    ],
    "connector-takes-pair, parts of blocks": [
        MLA,
        NIXL,
        sizes("decode", tensor=8, decodeContext=8),
        role("decode", kvCacheInterleaveSize=16),
    ],
    "connector-takes-pair, grouped queries": [
        {"spec": {"model": {"geometry": {"kvHeads": 1}}}},
        NIXL,
        sizes("decode", tensor=8, decodeContext=8),
    ],
    "connector-takes-pair, shards on one side": [UPSTREAM],
    "connector-takes-pair, interleaves that differ": [
        UPSTREAM,
        sizes("prefill", tensor=8, decodeContext=2),
        role("prefill", kvCacheInterleaveSize=16),
    ],
    "connector-takes-pair, an interleave that is the block on the other side": [
        UPSTREAM,
        sizes("prefill", tensor=8, decodeContext=2),
        role("decode", kvCacheInterleaveSize=32),
    ],
    "router-drives-connector": [
        {"spec": {"kvConnector": {"type": "mooncake-upstream"}}},
        sizes("decode", tensor=4, decodeContext=1),
    ],
    "interleave-divides-block": [role("decode", kvCacheInterleaveSize=48)],
    "interleave-divides-block, above": [role("decode", blockSize=100, kvCacheInterleaveSize=300)],
    "interleave-divides-block, large sizes": [role("prefill", blockSize=65535, kvCacheInterleaveSize=4000)],
    "replicas-or-scaling": [role("decode", replicas=2, scaling={"maxReplicas": 4})],
    "scaling-bounds": [role("decode", replicas=None, scaling={"minReplicas": 5, "maxReplicas": 4})],
    "rollout-not-stuck": [{"spec": {"rolloutStrategy": {"maxSurge": 0, "maxUnavailable": 0}}}],
    "model-cache": [{"spec": {"model": {"uri": "pvc://models/x", "cache": {"claimName": "models"}}}}],
    "multinode-ranks": [role("decode", multinode={"nodeCount": 3})],
    "multinode-ranks, all factors": [
        MLA,
        sizes("prefill", tensor=4, pipeline=3, prefillContext=2, decodeContext=2),
        role("prefill", multinode={"nodeCount": 5}),
    ],
    "multinode-data": [sizes("decode", data=2), role("decode", multinode={"nodeCount": 2})],
    "max-skew-positive": [{"spec": {"rolloutStrategy": {"maxSkew": "0%"}}}],
    "rdma-devices": [{"spec": {"kvConnector": {"rdma": {"resourceName": "rdma/ib"}}}}],
    "rollout-not-stuck, percentages": [{"spec": {"rolloutStrategy": {"maxSurge": "0%", "maxUnavailable": "0%"}}}],
}


#: Static rules that an object from before them may break, each on fields of its own.
OLD_MISTAKES = (
    [MLA, sizes("decode", tensor=8, decodeContext=3)],
    [role("decode", kvCacheInterleaveSize=48)],
    [role("decode", replicas=2, scaling={"maxReplicas": 4})],
    [role("prefill", multinode={"nodeCount": 3})],
    [{"spec": {"kvConnector": {"rdma": {"resourceName": "rdma/ib"}}}}],
)


def image(name: str) -> dict:
    return {"spec": {"image": name}}


def without_values(message: str) -> str:
    """Return a message without the nearest values: CEL names none where it can't know what they depend on."""
    sentence, _, rule = message.rpartition(" [")
    return f"{re.split(r'; (?:nearest that|no single)', sentence)[0]} [{rule}"


def is_taken(real: Cluster, verb: str, body: dict, *options: str) -> bool:
    try:
        real.kubectl(verb, *options, "--filename", "-", input=json.dumps(body))
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("changes", STATIC.values(), ids=STATIC.keys())
def test_a_static_rule_holds_without_the_webhook_and_says_the_same(send, changes):
    body = specimen(*changes)
    ours = [str(finding) for finding in check_body(body).violations if finding.rule in STATIC_RULES]
    assert ours
    code, _, err = send(body)
    assert code == 1
    for message in ours:
        assert message in err or without_values(message) in err


def test_an_update_that_leaves_alone_what_a_static_rule_reads_is_taken(real, namespace):
    """The object is stored while the rules are away, as one from before them would be."""
    definition = real.get("crd", "dcpdisaggdeployments.dcpdisagg.io")
    spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    rules = spec.pop("x-kubernetes-validations")
    path = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/x-kubernetes-validations"
    patch_crd = ("patch", "crd", "dcpdisaggdeployments.dcpdisagg.io", "--type=json", "--patch")
    mistakes = [change for changes in OLD_MISTAKES for change in changes]
    stored = specimen(*mistakes, {"metadata": {"name": "old", "namespace": namespace}})
    real.kubectl(*patch_crd, json.dumps([{"op": "remove", "path": path}]))
    try:
        eventually("it can be stored", lambda: is_taken(real, "create", stored), within_s=30.0)
    finally:
        real.kubectl(*patch_crd, json.dumps([{"op": "add", "path": path, "value": rules}]))
    again = merged(stored, {"metadata": {"name": "another"}})
    eventually("the rules are back", lambda: not is_taken(real, "create", again, "--dry-run=server"), within_s=30.0)
    try:
        for change in (image("acme/engine:2"), role("prefill", maxModelLen=512), role("decode", dtype="auto")):
            assert is_taken(real, "replace", merged(stored, change), "--dry-run=server")
        for change in (sizes("decode", tensor=16), role("decode", blockSize=128), role("decode", replicas=9)):
            assert not is_taken(real, "replace", merged(stored, change), "--dry-run=server")
    finally:
        real.kubectl("delete", "dcpd", "old", "--namespace", namespace)


def test_every_static_rule_is_tried():
    assert {name.partition(",")[0] for name in STATIC} == set(STATIC_RULES)


def test_the_server_and_the_rules_agree_on_objects_of_all_kinds(send):
    """Random sizes: the ids of the static rules that refuse them must be the same on both sides."""
    generator = random.Random(20_261_130)

    def size(largest: int) -> int:
        return generator.choice([1, 1, 2, 3, 4, generator.randint(1, largest)])

    bodies = []
    for number in range(120):
        change = {"metadata": {"name": f"object-{number}"}}
        for name in ("prefill", "decode"):
            parallelism = {"tensor": size(64), "decodeContext": size(64), "prefillContext": generator.choice([1, 1, 2])}
            fields = {"parallelism": parallelism, "blockSize": size(128) * 4}
            if generator.random() < 0.5:
                fields["kvCacheInterleaveSize"] = size(200)
            if generator.random() < 0.3:
                fields["scaling"] = {"minReplicas": size(5), "maxReplicas": size(5)}
            if generator.random() < 0.3:
                fields["replicas"] = None
            if generator.random() < 0.2:
                fields["multinode"] = {"nodeCount": generator.randint(2, 4)}
            change = merged(change, role(name, **fields))
        kind = generator.choice(["mooncake", "mooncake", "mooncake-upstream", "nixl"])
        change = merged(change, {"spec": {"kvConnector": {"type": kind}, "router": {"replicas": size(2) - 1}}})
        bodies.append(specimen(change))
    _, _, err = send(*bodies)
    refusals = {part.split('"', 1)[0]: part for part in re.split(r'DCPDisaggDeployment(?:\.dcpdisagg\.io)? "', err)[1:]}
    disagreements = []
    for body in bodies:
        name = body["metadata"]["name"]
        ours = {finding.rule for finding in check_body(body).violations} & set(STATIC_RULES)
        theirs = {rule for rule in STATIC_RULES if f"[{rule}]" in refusals.get(name, "")}
        if ours != theirs:
            disagreements.append((name, ours, theirs))
    assert disagreements == []
    assert len(refusals) > 30


def test_columns_short_name_and_category(real):
    definition = real.get("crd", "dcpdisaggdeployments.dcpdisagg.io")
    accepted = definition["status"]["acceptedNames"]
    assert (accepted["shortNames"], accepted["categories"]) == (["dcpd"], ["all"])
    columns = [column["name"] for column in definition["spec"]["versions"][0]["additionalPrinterColumns"]]
    assert columns == ["Model", "Ready", "Prefill", "Decode", "TP/DCP", "Reason", "Age"]


def test_the_server_has_no_complaint_about_the_definition(real):
    conditions = real.get("crd", "dcpdisaggdeployments.dcpdisagg.io")["status"]["conditions"]
    states = {condition["type"]: (condition["status"], condition.get("message")) for condition in conditions}
    assert states["Established"][0] == "True"
    assert states.get("NonStructuralSchema", ("False",))[0] == "False", states


def test_the_table_of_pod_fields_is_the_servers(real):
    schemas = json.loads(real.kubectl("get", "--raw", "/openapi/v3/api/v1"))["components"]["schemas"]
    for kind, known in (
        ("PodTemplateSpec", pod_fields.TEMPLATE),
        ("PodSpec", pod_fields.POD),
        ("Container", pod_fields.CONTAINER),
        ("ResourceRequirements", pod_fields.RESOURCES),
    ):
        assert set(schemas[f"io.k8s.api.core.v1.{kind}"]["properties"]) == set(known), kind
