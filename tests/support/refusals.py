"""Objects that make every rule speak: one for each rule and for each way in which it can say something."""

from typing import Any

from tests.support.specimens import MLA, main_container, role, sizes

Change = dict[str, Any]


def model(**fields: Any) -> Change:
    return {"spec": {"model": fields}}


def geometry(**fields: Any) -> Change:
    return model(geometry=fields)


def arguments(*extra: str, of: str = "decode") -> Change:
    return role(of, extraArgs=list(extra))


def connector(kind: str | None = None, **fields: Any) -> Change:
    return {"spec": {"kvConnector": {**({"type": kind} if kind else {}), **fields}}}


def pod(name: str, **fields: Any) -> Change:
    if name == "router":
        return {"spec": {"router": {"template": {"spec": fields}}}}
    return role(name, template={"spec": fields})


def resources(**sections: Any) -> Change:
    return main_container("decode", resources=sections)


UNKNOWN = model(uri="hf://example/unheard-of", geometry=None)
LINEAR = geometry(layout="linear")

#: What is special about the object -> how it differs from one that is right.
REFUSALS: dict[str, list[Change]] = {
    # naming, model
    "a name with a dot": [{"metadata": {"name": "chat.v1"}}],
    "a name without room": [{"metadata": {"name": "a" * 60}}],
    "a generated name without room": [{"metadata": {"name": "", "generateName": "a" * 60}}],
    "a repository of three parts": [model(uri="hf://a/b/c")],
    "a claim that can't be": [model(uri="pvc://Models/x")],
    "a folder outside the volume": [model(uri="pvc://models/../x")],
    "a revision of a volume": [model(uri="pvc://models/x", revision="main")],
    "an unknown model": [UNKNOWN],
    "a name without room for groups": [
        {"metadata": {"name": "a" * 40}},
        role("decode", multinode={"nodeCount": 2}),
    ],
    "a cache for a volume": [model(uri="pvc://models/x", cache={"claimName": "models"})],
    "a cache outside its claim": [model(cache={"claimName": "models", "path": "../x"})],
    # sizes
    "latent attention with eight heads": [MLA, geometry(kvHeads=8)],
    "KV heads that don't divide": [geometry(kvHeads=5)],
    "a context that doesn't divide tensor": [MLA, sizes("decode", tensor=8, decodeContext=3)],
    "a context where only 1 works": [sizes("decode", tensor=4, decodeContext=3)],
    "a context with prefill context": [MLA, sizes("prefill", tensor=4, prefillContext=2, decodeContext=3)],
    "prefill context beside data": [MLA, sizes("prefill", tensor=4, prefillContext=2, data=2)],
    "tensor that doesn't divide the heads": [sizes("prefill", tensor=3)],
    "tensor above the KV heads, no multiple": [geometry(attentionHeads=24, kvHeads=4), sizes("prefill", tensor=6)],
    "tensor below the KV heads, no divisor": [geometry(attentionHeads=24, kvHeads=8), sizes("prefill", tensor=3)],
    "a catalogued model and a tensor size that it forbids": [
        model(uri="hf://deepseek-ai/DeepSeek-V2-Lite", geometry=None),
        sizes("decode", tensor=3, decodeContext=3),
    ],
    "grouped queries without shared heads": [sizes("decode", tensor=4, decodeContext=2)],
    "grouped queries with too many shards": [sizes("decode", tensor=8, decodeContext=4)],
    "the case that vLLM misses": [geometry(attentionHeads=24, kvHeads=2), sizes("decode", tensor=12, decodeContext=4)],
    "query heads that the shards don't divide": [
        geometry(attentionHeads=24, kvHeads=4),
        sizes("decode", tensor=8, decodeContext=1),
        sizes("prefill", tensor=24, decodeContext=3),
        geometry(attentionHeads=72, kvHeads=8),
        sizes("decode", tensor=72, decodeContext=1),
        sizes("prefill", tensor=8),
    ],
    "an interleave that doesn't divide the block": [role("decode", kvCacheInterleaveSize=48)],
    "an interleave without shards": [role("prefill", kvCacheInterleaveSize=64)],
    "local ranks that don't divide all": [sizes("decode", data=4, dataLocal=3)],
    "copies that could be shards": [sizes("decode", decodeContext=1)],
    # nodes
    "ranks that nodes can't share": [role("decode", multinode={"nodeCount": 3})],
    "data-parallel ranks on several nodes": [sizes("decode", data=2), role("decode", multinode={"nodeCount": 2})],
    "an annotation of the group's": [
        role("decode", multinode={"nodeCount": 2, "annotations": {"dcpdisagg.io/x": "y"}}),
    ],
    # attention
    "a backend that doesn't shard": [arguments("--attention-backend=TRITON_ATTN")],
    "a backend that shards single tokens": [arguments("--attention-backend", "FLASHINFER_MLA")],
    "speculation with whole blocks": [arguments("--speculative-config", '{"method": "mtp"}')],
    "layers without a cache": [LINEAR],
    # formats
    "a block that no kernel reads": [role("decode", blockSize=24)],
    "an unknown format": [role("prefill", dtype="float7"), role("decode", dtype="float7")],
    "an unknown format of the cache": [role("prefill", kvCacheDtype="fp7"), role("decode", kvCacheDtype="fp7")],
    "a cache in the wrong 16 bits": [
        role(name, dtype="bfloat16", kvCacheDtype="float16") for name in ("prefill", "decode")
    ],
    "latent attention in four bits": [MLA, *(role(name, kvCacheDtype="nvfp4") for name in ("prefill", "decode"))],
    # pair
    "KV formats that differ": [role("decode", kvCacheDtype="fp8")],
    "a KV format in arguments": [arguments("--kv-cache-dtype=fp8", of="prefill")],
    "formats that differ": [role("decode", dtype="float16")],
    "quantization of one role": [arguments("--quantization=awq")],
    "another model": [arguments("--model=a/b")],
    "another revision": [arguments("--revision=v2")],
    "tokenizers that differ": [arguments("--tokenizer=a"), arguments("--tokenizer=b", of="prefill")],
    "code trusted by prefill alone": [arguments("--trust-remote-code", of="prefill")],
    "decode shorter than prefill": [role("decode", maxModelLen=1024), role("prefill", maxModelLen=2048)],
    "longer than the model": [role("prefill", maxModelLen=40000), role("decode", maxModelLen=40000)],
    "decode longer than prefill": [role("decode", maxModelLen=2048), role("prefill", maxModelLen=1024)],
    "a length of decode alone": [geometry(maxModelLen=None), role("decode", maxModelLen=2048)],
    # images
    "vLLM versions that differ": [role("decode", image="vllm/vllm-openai:v0.32.0")],
    "images that differ": [role("prefill", image="registry.example.com/engine@sha256:abc")],
    # connector
    "prefill context with the bundled connector": [MLA, sizes("prefill", tensor=4, prefillContext=2)],
    "ranks outside the pod": [sizes("decode", data=4, dataLocal=2)],
    "linear layers without shards": [LINEAR, sizes("decode", tensor=4, decodeContext=1)],
    "nixl with part of the ranks": [MLA, connector("nixl"), sizes("decode", tensor=8, decodeContext=2)],
    "nixl with grouped queries": [connector("nixl"), geometry(kvHeads=1), sizes("decode", tensor=8, decodeContext=8)],
    "nixl with parts of blocks": [
        MLA,
        connector("nixl"),
        sizes("decode", tensor=8, decodeContext=8),
        role("decode", kvCacheInterleaveSize=16),
    ],
    "nixl with blocks that differ": [
        MLA,
        connector("nixl"),
        sizes("decode", tensor=8, decodeContext=8),
        role("decode", blockSize=32),
    ],
    "nixl with sizes that don't divide": [
        MLA,
        geometry(attentionHeads=24),
        connector("nixl"),
        sizes("prefill", tensor=6),
        sizes("decode", tensor=8, decodeContext=8),
    ],
    "nixl with more copies on prefill": [
        connector("nixl"),
        sizes("prefill", tensor=8),
        sizes("decode", tensor=4, decodeContext=1),
    ],
    "upstream Mooncake with shards on one side": [
        connector("mooncake-upstream"),
        {"spec": {"router": {"replicas": 0}}},
    ],
    "upstream Mooncake with the router": [
        connector("mooncake-upstream"),
        sizes("decode", tensor=4, decodeContext=1),
    ],
    "a misspelt option": [connector(extraConfig={"lease_seconds": 3})],
    "an option unlike any": [connector(extraConfig={"zzz": 3})],
    "an option of the operator's": [connector(extraConfig={"bootstrap_port": 3})],
    "an option out of bounds": [connector(extraConfig={"lease_s": -1})],
    "an option that NIXL passes over": [
        MLA,
        connector("nixl", extraConfig={"kv_lease": 3}),
        sizes("decode", tensor=8, decodeContext=8),
    ],
    "rdma without a device": [connector(protocol="rdma")],
    "RDMA devices for TCP": [connector(protocol="tcp", rdma={"resourceName": "rdma/ib"})],
    "RDMA devices counted twice": [
        connector(protocol="rdma", rdma={"resourceName": "rdma/ib", "count": 2}),
        resources(limits={"rdma/ib": 1}),
    ],
    # counts
    "two owners of the count": [role("decode", scaling={"maxReplicas": 4})],
    "one role that scales": [role("decode", replicas=None, scaling={"maxReplicas": 4})],
    "bounds that cross": [role("decode", replicas=None, scaling={"minReplicas": 5, "maxReplicas": 4})],
    "ratios that cross": [{"spec": {"ratio": {"min": "2:1", "max": "1:2"}}}],
    "too few prefill engines": [{"spec": {"ratio": {"min": "4:1"}}}],
    "too many prefill engines": [{"spec": {"ratio": {"max": "1:1"}}}],
    "a rollout that can't move": [{"spec": {"rolloutStrategy": {"maxSurge": 0, "maxUnavailable": 0}}}],
    "a skew of nothing": [{"spec": {"rolloutStrategy": {"maxSkew": "0%"}}}],
    "a budget that lets nobody go": [role("decode", disruptionBudget={"maxUnavailable": 0})],
    "a hook in place of the one that waits": [
        main_container("prefill", lifecycle={"preStop": {"sleep": {"seconds": 9}}})
    ],
    "an engine that hides its load": [arguments("--disable-log-stats")],
    "namespaces of a policy that isn't": [{"spec": {"networkPolicy": {"enabled": False, "allowedNamespaces": ["a"]}}}],
    "times of a check that isn't made": [{"spec": {"transferCheck": {"enabled": False, "intervalSeconds": 600}}}],
    # arguments
    "two arguments in one item": [arguments("--seed 3")],
    "a stray word": [arguments("word")],
    "an abbreviation of several flags": [arguments("--max-num=3")],
    "a flag without its value": [arguments("--seed")],
    "a value that a switch doesn't take": [arguments("--enforce-eager=1")],
    "a call for help": [arguments("--help")],
    "a number that is none": [arguments("-tp", "eight")],
    "an unknown flag": [arguments("--enforce-eagr")],
    "a flag unlike any": [arguments("--zzz")],
    "a flag of the operator's": [arguments("--port=1")],
    "the deprecated interleave": [arguments("--dcp-kv-cache-interleave-size=16")],
    "an argument that contradicts": [arguments("-tp=4")],
    "an argument that contradicts a default": [arguments("--cp-kv-cache-interleave-size=16", "--max-model-len=1k")],
    "another served name": [arguments("--served-model-name", "gpt")],
    # templates
    "a list that is none": [pod("decode", containers="main")],
    "a field that Kubernetes doesn't know": [pod("decode", nodeSelectr={})],
    "a container without a name": [pod("decode", containers=[{}])],
    "another image in the template": [main_container("decode", image="x")],
    "arguments in the template": [main_container("decode", args=["x"])],
    "an owned variable": [main_container("decode", env=[{"name": "VLLM_HOST_IP", "value": "x"}])],
    "a path that is not plain": [main_container("decode", env=[{"name": "PYTHONPATH", "valueFrom": {}}])],
    "an owned mount": [main_container("decode", volumeMounts=[{"name": "x", "mountPath": "/models/x"}])],
    "an owned volume": [pod("decode", volumes=[{"name": "model"}])],
    "an owned container": [pod("decode", initContainers=[{"name": "connector"}])],
    "a pod that ends": [pod("decode", restartPolicy="Never")],
    "an owned label": [role("decode", template={"metadata": {"labels": {"app.kubernetes.io/name": "x"}}})],
    "a label of the group": [role("decode", template={"metadata": {"labels": {"dcpdisagg.io/x": "x"}}})],
    "an account of the router": [pod("router", serviceAccountName="x")],
    "a router that sees nothing": [pod("router", automountServiceAccountToken=False)],
    "too few accelerators": [resources(limits={"nvidia.com/gpu": 3})],
    "accelerators of another vendor": [resources(limits={"amd.com/gpu": 8})],
    "accelerators of a sidecar": [
        pod("decode", containers=[{"name": "side", "resources": {"limits": {"nvidia.com/gpu": 1}}}])
    ],
    "requests above limits": [resources(limits={"memory": "1Gi"}, requests={"memory": "2Gi"})],
    "no time to drain": [pod("decode", terminationGracePeriodSeconds=30)],
    "the node's network in the template alone": [pod("decode", hostNetwork=True)],
    "the node's network, yes and no": [role("decode", hostNetwork=True), pod("decode", hostNetwork=False)],
    "one node for engines on its network": [
        role("decode", hostNetwork=True),
        {"spec": {"topologyConstraint": {"topologyKey": "kubernetes.io/hostname", "enforcement": "Required"}}},
    ],
    "a domain that no label names": [{"spec": {"topologyConstraint": {"topologyKey": "rack=a"}}}],
    "an affinity that can't be joined": [
        {"spec": {"topologyConstraint": {"topologyKey": "rack"}}},
        pod("prefill", affinity={"podAffinity": "rack"}),
        pod("decode", affinity={"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}}),
    ],
    "a privileged container": [main_container("decode", securityContext={"privileged": True})],
    "what engines don't need of a node": [
        main_container("decode", securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
        pod("prefill", hostIPC=True, volumes=[{"name": "x", "hostPath": {"path": "/dev"}}]),
    ],
    "no shared memory for eight ranks": [role("decode", sharedMemorySize="0")],
    "more shared memory than memory": [role("decode", sharedMemorySize="8Gi"), resources(limits={"memory": "1Gi"})],
    "shared memory stated twice": [role("decode", sharedMemorySize="8Gi"), pod("decode", volumes=[{"name": "dshm"}])],
}

#: Updates that make a rule speak that judges the change itself: what the object was before, and what it becomes.
UPDATES: dict[str, tuple[Change, Change]] = {
    "scaling is taken away": (
        role("decode", replicas=None, scaling={"minReplicas": 1, "maxReplicas": 4}),
        role("decode", replicas=2),
    ),
}
