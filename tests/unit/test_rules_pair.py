"""Rules between the roles, on the connector, on scaling, names and the model: complete messages, as a user reads
them."""

import pytest

from tests.support.specimens import MLA, main_container, merged, report, role, sizes, violations


def extra_args(name, *arguments):
    return role(name, extraArgs=list(arguments))


def connector(**options):
    return {"spec": {"kvConnector": options}}


REFUSED = {
    "KV data types that differ": (
        [role("decode", kvCacheDtype="fp8")],
        (
            "spec.decode.kvCacheDtype: fp8 differs from spec.prefill.kvCacheDtype auto, and both must be the same; "
            "nearest "
            "that work: auto here, or fp8 in spec.prefill.kvCacheDtype [kv-dtype-equal]"
        ),
    ),
    "KV data type set in the arguments of one role": (
        [extra_args("prefill", "--kv-cache-dtype", "fp8")],
        (
            "spec.decode.kvCacheDtype: auto differs from spec.prefill.kvCacheDtype fp8, and both must be the same; "
            "nearest that works: fp8 [kv-dtype-equal]"
        ),
    ),
    "data types that differ": (
        [role("prefill", dtype="bfloat16"), role("decode", dtype="float16")],
        (
            "spec.decode.dtype: float16 differs from spec.prefill.dtype bfloat16, and both must be the same; nearest "
            "that "
            "work: bfloat16 here, or float16 in spec.prefill.dtype [dtype-equal]"
        ),
    ),
    "quantization on one role": (
        [extra_args("decode", "--quantization=awq")],
        (
            'spec.decode.extraArgs[0]: --quantization is "awq" in spec.decode.extraArgs and absent in '
            "spec.prefill.extraArgs, and both must be the same; state it alike on both roles, or on neither "
            "[dtype-equal]"
        ),
    ),
    "another model in the arguments": (
        [extra_args("decode", "--model", "other/model")],
        (
            'spec.decode.extraArgs[0]: --model says "other/model", but spec.model.uri is "hf://example/model", and '
            "it is "
            "stated once for both roles; remove the argument and set spec.model.uri [model-equal]"
        ),
    ),
    "a revision in the arguments": (
        [extra_args("prefill", "--revision=v2")],
        (
            'spec.prefill.extraArgs[0]: --revision says "v2", but spec.model.revision is not stated, and it is '
            "stated once "
            "for both roles; remove the argument and set spec.model.revision [model-equal]"
        ),
    ),
    "remote code trusted on one role": (
        [extra_args("prefill", "--trust-remote-code")],
        (
            "spec.prefill.extraArgs[0]: --trust-remote-code is absent in spec.decode.extraArgs and on in "
            "spec.prefill.extraArgs, and both must be the same; state it alike on both roles, or on neither "
            "[model-equal]"
        ),
    ),
    "tokenizers that differ": (
        [extra_args("prefill", "--tokenizer=a"), extra_args("decode", "--tokenizer=b")],
        (
            'spec.decode.extraArgs[0]: --tokenizer is "b" in spec.decode.extraArgs and "a" in '
            "spec.prefill.extraArgs, and "
            "both must be the same; state it alike on both roles, or on neither [model-equal]"
        ),
    ),
    "decode shorter than prefill": (
        [role("prefill", maxModelLen=16384), role("decode", maxModelLen=8192)],
        (
            "spec.decode.maxModelLen: 8192 is below spec.prefill.maxModelLen 16384, and decode must take every "
            "prompt that "
            "prefill takes; nearest that work: 16384 here, or 8192 in spec.prefill.maxModelLen [max-model-len]"
        ),
    ),
    "decode shorter than what prefill takes from the model": (
        [role("decode", maxModelLen=8192)],
        (
            "spec.decode.maxModelLen: 8192 is below spec.prefill.maxModelLen 32768, and decode must take every "
            "prompt that "
            "prefill takes; nearest that work: 32768 here, or 8192 in spec.prefill.maxModelLen [max-model-len]"
        ),
    ),
    "longer than the model": (
        [role("prefill", maxModelLen=40000), role("decode", maxModelLen=40000)],
        (
            "spec.prefill.maxModelLen: 40000 is above spec.model.geometry.maxModelLen 32768; nearest that works: 32768 "
            "[max-model-len]"
        ),
    ),
    "no suggestion that the model forbids": (
        [role("prefill", maxModelLen=40000)],
        (
            "spec.decode.maxModelLen: 32768 is below spec.prefill.maxModelLen 40000, and decode must "
            "take every prompt that "
            "prefill takes; nearest that works: 32768 in spec.prefill.maxModelLen [max-model-len]"
        ),
    ),
    "prefill context parallelism": (
        [MLA, sizes("prefill", prefillContext=2)],
        (
            "spec.prefill.parallelism.prefillContext: 2 with spec.kvConnector.type mooncake, which takes at most 1; "
            "nearest that works: 1 [connector-takes-pair]"
        ),
    ),
    "a misspelt connector option": (
        [connector(extraConfig={"lease_seconds": 3})],
        (
            "spec.kvConnector.extraConfig.lease_seconds: is no option of the bundled connector; did you mean lease_s? "
            "[connector-config]"
        ),
    ),
    "a connector option that the operator sets": (
        [connector(extraConfig={"mooncake_protocol": "tcp"})],
        (
            'spec.kvConnector.extraConfig.mooncake_protocol: "tcp" is set by the operator; state '
            "spec.kvConnector.protocol "
            "instead [connector-config]"
        ),
    ),
    "a port of the connector": (
        [connector(extraConfig={"bootstrap_port": 9000})],
        (
            "spec.kvConnector.extraConfig.bootstrap_port: 9000 is set by the operator; the probes and the Services "
            "rely on "
            "its value; remove it [connector-config]"
        ),
    ),
    "a connector option out of bounds": (
        [connector(extraConfig={"lease_s": 0})],
        "spec.kvConnector.extraConfig.lease_s: found 0, which should be greater than 0 [connector-config]",
    ),
    "two owners of the replica count": (
        [role("decode", replicas=2, scaling={"minReplicas": 1, "maxReplicas": 4})],
        (
            "spec.decode.replicas: 2 is stated together with spec.decode.scaling (1 to 4), and the "
            "replica count has exactly one owner; remove one of the two [replicas-or-scaling]"
        ),
    ),
    "scaling bounds that cross": (
        [role("decode", replicas=None, scaling={"minReplicas": 5, "maxReplicas": 4})],
        (
            "spec.decode.scaling.minReplicas: 5 is above spec.decode.scaling.maxReplicas 4; nearest that work: 4 "
            "here, or 5 in spec.decode.scaling.maxReplicas [scaling-bounds]"
        ),
    ),
    "a rollout that can't move": (
        [{"spec": {"rolloutStrategy": {"maxSurge": 0, "maxUnavailable": "0%"}}}],
        (
            "spec.rolloutStrategy.maxUnavailable: 0 together with spec.rolloutStrategy.maxSurge 0 lets no rollout "
            "move, "
            "because it may neither add an engine nor take one away; nearest that work: 1 here, or 1 in "
            "spec.rolloutStrategy.maxSurge [rollout-not-stuck]"
        ),
    ),
    "a name that leaves no room": (
        [{"metadata": {"name": "a" * 63}}],
        (
            "metadata.name: has 63 characters, and the longest derived name adds 17 to it, beyond the 63 that "
            "Kubernetes "
            "allows; at most 46 fit [name-length]"
        ),
    ),
    "a generated name that leaves no room": (
        [{"metadata": {"name": "", "generateName": "a" * 42}}],
        (
            "metadata.generateName: has 47 characters, and the longest derived name adds 17 to it, beyond the 63 that "
            "Kubernetes allows; at most 46 fit [name-length]"
        ),
    ),
    "a name that no Service can have": (
        [{"metadata": {"name": "7b.chat"}}],
        (
            'metadata.name: "7b.chat" can\'t be the name of a Service: small letters, digits and dashes, a letter '
            "first and "
            "no dash last [name-valid]"
        ),
    ),
    "a repository with too many parts": (
        [{"spec": {"model": {"uri": "hf://a/b/c"}}}],
        'spec.model.uri: "a/b/c" is no Hugging Face repository; write hf://OWNER/NAME [model-uri]',
    ),
    "a claim that can't exist": (
        [{"spec": {"model": {"uri": "pvc://Models/chat"}}}],
        'spec.model.uri: "Models" is no name of a PersistentVolumeClaim; write pvc://CLAIM/FOLDER [model-uri]',
    ),
    "a folder outside the volume": (
        [{"spec": {"model": {"uri": "pvc://models/../etc"}}}],
        'spec.model.uri: the folder "../etc" leaves the volume; write it without ".." in it [model-uri]',
    ),
    "a revision of a volume": (
        [{"spec": {"model": {"uri": "pvc://models/chat", "revision": "main"}}}],
        (
            'spec.model.revision: "main" with spec.model.uri "pvc://models/chat": only hf:// models have revisions; '
            "remove "
            "it [model-uri]"
        ),
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses(changes, message):
    assert message in violations(*changes)


WARNED = {
    "decode longer than prefill": (
        [role("prefill", maxModelLen=8192), role("decode", maxModelLen=16384)],
        (
            "spec.decode.maxModelLen: 16384 is above spec.prefill.maxModelLen 8192, so prompts longer than 8192 "
            "tokens are "
            "refused by prefill [max-model-len]"
        ),
    ),
    "prefill's length unknown while decode's is stated": (
        [{"spec": {"model": {"geometry": {"maxModelLen": None}}}}, role("decode", maxModelLen=8192)],
        (
            "spec.prefill.maxModelLen: is not stated, so prefill takes the model's own limit, which may be above "
            "spec.decode.maxModelLen 8192; state 8192 here too [max-model-len]"
        ),
    ),
    "rdma without a device": (
        [connector(protocol="rdma")],
        (
            "spec.prefill.template.spec.containers[main].resources.limits: has no RDMA resource, and "
            "spec.kvConnector.protocol is rdma; state the cluster's RDMA device in spec.kvConnector.rdma, or set "
            "protocol tcp [rdma-resources]"
        ),
    ),
    "a model whose heads are unknown": (
        [{"spec": {"model": {"geometry": None}}}],
        (
            "spec.model.geometry: is not stated and the catalogue lacks the model, so not checked: heads-divide-tp, "
            "gqa-dcp-replicas, dcp-advice, dcp-full-attention-only, part of connector-takes-pair; state it from "
            "config.json [unknown-model]"
        ),
    ),
}


@pytest.mark.parametrize(("changes", "message"), WARNED.values(), ids=WARNED.keys())
def test_warns(changes, message):
    verdict = report(*changes)
    assert verdict.allowed
    assert message in map(str, verdict.warnings)


ALLOWED = {
    "two names for one KV data type": [role("prefill", kvCacheDtype="fp8"), role("decode", kvCacheDtype="fp8_e4m3")],
    "a KV data type stated once as field and once as argument": [
        role("prefill", kvCacheDtype="fp8"),
        extra_args("decode", "--kv-cache-dtype=fp8"),
    ],
    "auto said aloud on one role": [role("decode", kvCacheDtype="auto")],
    "two names for one data type": [role("prefill", dtype="half"), role("decode", dtype="float16")],
    "the same quantization": [extra_args("prefill", "-q", "awq"), extra_args("decode", "--quantization=awq")],
    "remote code trusted on both roles": [
        extra_args("prefill", "--trust-remote-code"),
        extra_args("decode", "--trust_remote_code"),
    ],
    "remote code refused aloud on one role": [extra_args("decode", "--no-trust-remote-code")],
    "the model repeated": [extra_args("decode", "--model=example/model")],
    "scaling instead of replicas": [
        role(name, replicas=None, scaling={"maxReplicas": 4}) for name in ("prefill", "decode")
    ],
    "scaling of one role with the ratios that are meant": [
        role("decode", replicas=None, scaling={"maxReplicas": 4}),
        {"spec": {"ratio": {"min": "1:2", "max": "2:1"}}},
    ],
    "no replicas stated": [role("decode", replicas=None)],
    "taking one away instead of adding one": [{"spec": {"rolloutStrategy": {"maxSurge": 0, "maxUnavailable": 1}}}],
    "the longest name": [{"metadata": {"name": "a" * 46}}],
    "a model on a volume": [{"spec": {"model": {"uri": "pvc://models/chat"}}}],
    "data parallelism": [sizes("decode", data=2)],
    "pipelines of different depth": [sizes("prefill", pipeline=2), sizes("decode", pipeline=3)],
    "windows that are kept whole": [
        {"spec": {"model": {"geometry": {"layout": "sliding"}}}},
        sizes("decode", tensor=4, decodeContext=1),
        *(extra_args(name, "--disable-hybrid-kv-cache-manager") for name in ("prefill", "decode")),
    ],
    "connector options": [connector(extraConfig={"lease_s": 30, "device_name": "mlx5_0"})],
    "a length stated as argument where no field says one": [
        {"spec": {"model": {"geometry": {"maxModelLen": None}}}},
        extra_args("prefill", "--max-model-len=8k"),
        extra_args("decode", "--max-model-len=8000"),
    ],
}


@pytest.mark.parametrize("changes", ALLOWED.values(), ids=ALLOWED.keys())
def test_allows_without_a_word(changes):
    verdict = report(*changes)
    assert (verdict.violations, verdict.warnings) == ((), ())


RDMA = {
    "a shared device plugin's resource": {"resources": {"limits": {"rdma/hca_shared_devices_a": 1}}},
    "a vendor's resource": {"resources": {"limits": {"vpc.amazonaws.com/efa": "4"}}},
    "a resource claim": {"resources": {"claims": [{"name": "nic"}]}},
}


@pytest.mark.parametrize("fields", RDMA.values(), ids=RDMA.keys())
def test_an_rdma_device_quiets_the_warning(fields):
    changes = [connector(protocol="rdma"), main_container("prefill", **fields), main_container("decode", **fields)]
    assert report(*changes).warnings == ()


def test_all_findings_are_reported_at_once_in_the_order_of_the_rules():
    change = merged(
        sizes("decode", tensor=8, decodeContext=3), {"spec": {"kvConnector": {"extraConfig": {"lease_s": -1}}}}
    )
    change = merged(change, role("prefill", kvCacheDtype="fp8", maxModelLen=99999))
    rules = [finding.rule for finding in report(change).violations]
    assert rules == ["dcp-divides-tp", "kv-dtype-equal", "max-model-len", "max-model-len", "connector-config"]
