"""The rules against the connector's geometry, their suggestions, and their composure before any object."""

import copy
import re
import time

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dcp_connector.geometry import find_violations
from dcp_operator.api.findings import Severity
from dcp_operator.api.load import load
from dcp_operator.build import render
from dcp_operator.flags import known_flags
from dcp_operator.rules import check, check_body, rule_ids
from dcp_operator.rules.edits import changed_body
from dcp_operator.rules.suggest import suggest
from tests.support.specimens import merged, role, sizes, specimen

#: Rules on one role's sizes that say whether the role can be one side of a transfer.
SIDE_RULES = {"dcp-divides-tp", "heads-divide-tp", "gqa-dcp-replicas", "interleave-divides-block"}
ROLES = ("prefill", "decode")

SIZE = st.integers(1, 16)
BLOCK = st.sampled_from([1, 2, 3, 4, 6, 12, 16, 24, 64])
#: Rows of a block; every attention backend takes multiples of 16 only (block-size-kernel).
ROWS = st.sampled_from([16, 32, 48, 64, 80, 96])


@st.composite
def sides(draw):
    """Sizes of one role, valid or not, with a model for them."""
    attention = draw(st.sampled_from(["mla", "gqa"]))
    kv_heads = 1 if attention == "mla" else draw(st.sampled_from([1, 2, 3, 4, 8]))
    return {
        "tensor": draw(SIZE),
        "decodeContext": draw(SIZE),
        "blockSize": draw(ROWS),
        "interleave": draw(BLOCK),
        "attention": attention,
        "kvHeads": kv_heads,
        "attentionHeads": kv_heads * draw(st.integers(1, 48)),
    }


def body_of(side, name="decode"):
    """Return an object one of whose roles has these sizes; the other role is valid with every model."""
    geometry = {key: side[key] for key in ("attention", "kvHeads", "attentionHeads")}
    other = "prefill" if name == "decode" else "decode"
    return specimen(
        {"spec": {"model": {"geometry": geometry}}},
        sizes(other, tensor=1, decodeContext=1),
        sizes(name, tensor=side["tensor"], decodeContext=side["decodeContext"]),
        role(name, blockSize=side["blockSize"], kvCacheInterleaveSize=side["interleave"]),
    )


def refused_by(body):
    return {finding.rule for finding in check_body(body).violations}


def transfer_refuses(side):
    return bool(
        find_violations(
            tensor_parallel_size=side["tensor"],
            dcp_size=side["decodeContext"],
            interleave=side["interleave"],
            block_size=side["blockSize"],
            num_kv_heads=side["kvHeads"],
        )
    )


def engine_refuses(side):
    """What vLLM itself checks beyond what a transfer needs (config/parallel.py, config/model.py)."""
    tensor, context, heads = side["tensor"], side["decodeContext"], side["kvHeads"]
    refused = side["attentionHeads"] % tensor != 0
    if context > 1 and side["attention"] == "gqa":
        refused |= tensor <= heads or context > tensor // heads or (side["attentionHeads"] // heads) % context != 0
    return refused


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sides(), st.sampled_from(ROLES))
def test_nothing_is_allowed_that_a_transfer_or_the_engine_refuses(side, name):
    if not refused_by(body_of(side, name)) & SIDE_RULES:
        assert not transfer_refuses(side)
        assert not engine_refuses(side)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sides(), st.sampled_from(ROLES))
def test_nothing_is_refused_that_both_take(side, name):
    refused = refused_by(body_of(side, name)) & SIDE_RULES
    if not transfer_refuses(side) and not engine_refuses(side):
        # Policy: with one shard an interleave does nothing, but it must make sense once there are more.
        allowed_policy = {"interleave-divides-block"} if side["decodeContext"] == 1 else set()
        assert refused <= allowed_policy


def test_brute_force_over_small_sides():
    """Every combination of small sizes, so that no corner is left to chance."""
    compared = refused_count = 0
    for tensor in (1, 2, 3, 4, 6, 8, 12):
        for context in (1, 2, 3, 4, 6):
            for heads, per_head in ((1, 8), (1, 24), (2, 12), (4, 8), (3, 16)):
                for attention in ("gqa", "mla") if heads == 1 else ("gqa",):
                    side = {
                        "tensor": tensor,
                        "decodeContext": context,
                        "blockSize": 12,
                        "interleave": 5 if (tensor + context) % 4 == 0 else 4,
                        "attention": attention,
                        "kvHeads": heads,
                        "attentionHeads": heads * per_head,
                    }
                    refused = bool(refused_by(body_of(side)) & SIDE_RULES)
                    policy = context == 1 and side["blockSize"] % side["interleave"] != 0
                    assert refused == (transfer_refuses(side) or engine_refuses(side) or policy), side
                    compared += 1
                    refused_count += refused
    assert compared == 245
    assert 50 < refused_count < 240


NEAREST = re.compile(r"; nearest that works?: (?P<here>.*)$")
ELSEWHERE = re.compile(r"^(?P<values>.+) in (?P<path>spec\.\S+)$")


def nearest_of(finding):
    """Yield (path, value) of every value that a message names as one that works."""
    found = NEAREST.search(finding.message)
    if found is None:
        return
    for part in found["here"].split(", or "):
        there = ELSEWHERE.match(part)
        if there:
            yield from ((there["path"], value) for value in there["values"].split(" or "))
        elif part != "leave it out":
            yield from ((finding.path, value) for value in part.removesuffix(" here").split(", "))


def with_value(body, path, text):
    changed = copy.deepcopy(body)
    *way, last = path.split(".")
    holder = changed
    for step in way:
        holder = holder.setdefault(step, {})
    holder[last] = int(text) if text.isdigit() else {"true": True, "false": False}.get(text, text)
    return changed


@st.composite
def objects(draw):
    """Objects with sizes, lengths, formats, counts and connectors that fit or don't."""
    change = {"spec": {"kvConnector": {"type": draw(st.sampled_from(["mooncake", "mooncake-upstream", "nixl"]))}}}
    side = draw(sides())
    geometry = {key: side[key] for key in ("attention", "kvHeads", "attentionHeads")}
    change = merged(change, {"spec": {"model": {"geometry": geometry}}})
    for name in ROLES:
        own = draw(sides())
        fields = {
            "blockSize": own["blockSize"],
            "kvCacheInterleaveSize": draw(st.none() | BLOCK),
            "maxModelLen": draw(st.sampled_from([None, 1024, 32768, 65536])),
            "kvCacheDtype": draw(st.sampled_from([None, "fp8", "auto"])),
            "extraArgs": draw(
                st.lists(st.sampled_from(["-tp=4", "--port", "1", "--seed=1", "--block_size=16"]), max_size=4)
            ),
            "replicas": draw(st.sampled_from([None, 1, 4])),
            "scaling": draw(st.sampled_from([None, None, {"minReplicas": 2, "maxReplicas": 1}])),
            "multinode": draw(st.sampled_from([None, None, {"nodeCount": 2}, {"nodeCount": 3}])),
            "hostNetwork": draw(st.booleans()),
            "template": draw(st.sampled_from([{}, {}, {"spec": {"hostNetwork": True}}])),
        }
        change = merged(change, role(name, **fields))
        wide = {key: draw(st.sampled_from([1, 1, 1, 2])) for key in ("pipeline", "data", "prefillContext")}
        change = merged(change, sizes(name, tensor=own["tensor"], decodeContext=own["decodeContext"], **wide))
    ratio = draw(st.sampled_from([None, None, {"min": "3:1"}, {"min": "2:1", "max": "1:2"}]))
    strategy = draw(st.sampled_from([{}, {}, {"maxSurge": 0, "maxUnavailable": "0%"}, {"maxSkew": "0%"}]))
    near = draw(st.sampled_from([None, None, {"topologyKey": "kubernetes.io/hostname", "enforcement": "Required"}]))
    rdma = draw(st.sampled_from([None, None, {"resourceName": "rdma/ib"}]))
    more = {"topologyConstraint": near, "kvConnector": {"rdma": rdma}}
    return specimen(change, {"spec": {"ratio": ratio, "rolloutStrategy": strategy, **more}})


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(objects())
def test_each_value_that_a_message_names_cures_its_finding_and_brings_no_other(body):
    before = {(finding.rule, finding.path) for finding in check_body(body).violations}
    for finding in check_body(body).violations:
        for path, text in nearest_of(finding):
            after = {(each.rule, each.path) for each in check_body(with_value(body, path, text)).violations}
            assert after <= before - {(finding.rule, finding.path)}, (finding, path, text)
            assert all(left != path for _, left in after), (finding, path, text)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sides(), st.sampled_from(ROLES))
def test_a_value_named_for_a_single_mistake_makes_the_object_accepted(side, name):
    body = body_of(side, name)
    findings = check_body(body).violations
    assume(len(findings) == 1)
    for path, text in nearest_of(findings[0]):
        assert check_body(with_value(body, path, text)).allowed, (findings[0], path, text)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(objects())
def test_a_suggested_object_is_accepted_and_is_the_object_with_the_changes(body):
    kept = copy.deepcopy(body)
    suggestion = suggest(body)
    assert body == kept
    assert suggestion is not None
    assert check_body(suggestion.body).allowed
    changed = body
    for fix in suggestion.changes:
        changed = changed_body(changed, fix)
    assert changed == suggestion.body
    assert bool(suggestion.changes) != check_body(body).allowed


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sides(), st.sampled_from(ROLES))
def test_no_smaller_change_works_than_the_suggested_one(side, name):
    """Brute force over the sizes of one role: where one field is enough, one field is changed."""
    body = body_of(side, name)
    assume(not check_body(body).allowed)
    suggestion = suggest(body)
    assert suggestion is not None
    path = f"spec.{name}.parallelism"
    single = [
        (field, value)
        for field, largest in ((f"{path}.decodeContext", 16), (f"{path}.tensor", 32))
        for value in range(1, largest + 1)
        if check_body(with_value(body, field, str(value))).allowed
    ]
    if single:
        assert len(suggestion.changes) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
POD_WORDS = st.sampled_from(
    [
        "metadata", "labels", "annotations", "spec", "containers", "initContainers", "name", "main", "image", "args",
        "command", "env", "value", "valueFrom", "resources", "limits", "requests", "claims", "nvidia.com/gpu", "cpu",
        "memory", "ports", "containerPort", "volumes", "volumeMounts", "mountPath", "hostNetwork", "securityContext",
        "capabilities", "privileged", "affinity", "podAffinity", "hostPath",
        "startupProbe", "livenessProbe", "httpGet", "restartPolicy", "emptyDir",
        "terminationGracePeriodSeconds", "dcpdisagg.io/role", "PYTHONPATH", "connector", "dshm", "hostAliases", "ip",
    ]
)  # fmt: skip
POD_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | POD_WORDS | st.sampled_from(["1Gi", "8", "-1", "x", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(POD_WORDS, inner, max_size=4),
    max_leaves=12,
)
ENTRY = st.dictionaries(POD_WORDS, POD_JSON, max_size=3).map(lambda fields: {"name": "main", **fields})
TEMPLATE = st.fixed_dictionaries(
    {},
    optional={
        "metadata": st.dictionaries(st.sampled_from(["labels", "annotations"]), POD_JSON, max_size=2),
        "spec": st.dictionaries(POD_WORDS, POD_JSON | st.lists(ENTRY, max_size=2), max_size=4),
    },
)
ARGUMENT = (
    st.sampled_from(list(known_flags().by_name))
    | st.text(max_size=10)
    | st.tuples(st.sampled_from(list(known_flags().by_name)), st.sampled_from(["1", "x", "8k", "", "auto", "a_b"])).map(
        "=".join
    )
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    template=TEMPLATE | st.dictionaries(st.text(max_size=5), JSON, max_size=3),
    place=st.sampled_from([*ROLES, "router"]),
)
def test_a_template_never_makes_the_rules_stumble_and_an_allowed_one_can_be_rendered(template, place):
    loaded = load(specimen(role(place, template=template)))
    assert loaded.obj is not None
    report = check(loaded.obj)
    if report.allowed:
        render("chat", "models", loaded.obj.spec, operator_image="x")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    arguments=st.lists(ARGUMENT, max_size=6),
    extra=st.dictionaries(
        st.sampled_from(["lease_s", "path", "staging_bytes", "mooncake_protocol", "lease"]) | st.text(max_size=5),
        JSON,
        max_size=3,
    ),
    name=st.sampled_from(ROLES),
)
def test_arguments_and_options_never_make_the_rules_stumble(arguments, extra, name):
    loaded = load(specimen(role(name, extraArgs=arguments), {"spec": {"kvConnector": {"extraConfig": extra}}}))
    assert loaded.obj is not None
    report = check(loaded.obj)
    assert {finding.rule for finding in (*report.violations, *report.warnings)} <= set(rule_ids())
    for finding in (*report.violations, *report.warnings):
        assert finding.path.startswith(("metadata.", "spec."))
        assert str(finding).isprintable()
        assert len(str(finding)) < 800, finding
    if report.allowed:
        render("chat", "models", loaded.obj.spec, operator_image="x")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sides(), sides())
def test_the_same_object_gives_the_same_findings_in_the_same_order(prefill, decode):
    body = merged(body_of(prefill, "prefill"), {"spec": {"decode": body_of(decode)["spec"]["decode"]}})
    first = check_body(body)
    assert first == check_body(copy.deepcopy(body))
    order = [rule_ids().index(finding.rule) for finding in first.violations]
    assert order == sorted(order)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.recursive(
        JSON, lambda inner: st.dictionaries(st.sampled_from(["spec", "metadata", "kind"]), inner), max_leaves=5
    )
)
def test_no_document_makes_the_rules_stumble(document):
    if isinstance(document, dict):
        assert not check_body(document).allowed


@pytest.mark.parametrize("rule", rule_ids())
def test_every_rule_explains_itself_in_three_parts(rule):
    from dcp_operator.rules import explain

    text = explain(rule)
    assert text is not None
    assert text.count("\n\n") >= 2, "what it asks for, why, what to do"


def test_deep_and_large_values_do_not_make_the_rules_stumble():
    deep: dict = {}
    for level in range(5000):
        deep = {"a": deep, "name": "main"} if level % 2 else {"spec": [deep]}
    body = specimen(role("prefill", extraArgs=["-" * 4096, "--" + "a." * 2000, "--x=" + "9" * 4000]))
    body["spec"]["decode"]["template"] = {"spec": {"containers": [deep], "volumes": ["x" * 1_000_000]}}
    body["spec"]["kvConnector"]["extraConfig"] = {"lease_s": deep, "path": ["x"] * 10_000}
    report = check_body(body)
    assert not report.allowed
    assert all(finding.severity is Severity.ERROR for finding in report.violations)
    assert max(len(str(finding)) for finding in report.violations) < 800


GARBAGE = {
    "arguments": lambda: role("decode", extraArgs=["--x" + "a" * 4000] * 256),
    "words": lambda: role("decode", extraArgs=["a" * 4096] * 256),
    "fields of a pod": lambda: role("decode", template={"spec": {f"{'x' * 50}{n}": n for n in range(20_000)}}),
    "containers": lambda: role("decode", template={"spec": {"containers": [{"name": f"c{n}"} for n in range(20_000)]}}),
    "options": lambda: {"spec": {"kvConnector": {"extraConfig": {f"{'x' * 50}{n}": n for n in range(20_000)}}}},
}


@pytest.mark.parametrize("change", GARBAGE.values(), ids=GARBAGE.keys())
def test_a_megabyte_of_garbage_is_answered_in_time(change):
    """In processor time; it takes a fraction of a second, and what grows with the square of the size takes minutes."""
    loaded = load(specimen(change()))
    assert loaded.obj is not None
    begin = time.process_time()
    report = check(loaded.obj)
    assert time.process_time() - begin < 10
    assert len(report.violations) + len(report.warnings) <= 300
