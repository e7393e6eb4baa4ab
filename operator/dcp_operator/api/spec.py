"""`spec` of a DCPDisaggDeployment: what the user states.

Descriptions become the text of `kubectl explain`. Defaults written here become defaults of the CRD; values that depend
on other fields are derived in `dcp_operator.settings` and shown in status.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, StringConstraints

from dcp_operator.api.base import ApiModel

#: Largest parallel size that is accepted: bounds the CEL cost of the CRD and catches typing errors.
MAX_PARALLEL_SIZE = 1024
#: Largest KV block, in tokens, and so the largest interleave.
MAX_BLOCK_SIZE = 65536
MAX_REPLICAS = 1000
#: Longest context that is accepted, in tokens.
MAX_MODEL_LEN = 2**31 - 1

#: The accelerator resource that stands for "no accelerator": engines run on the pods' CPUs.
CPU = "cpu"

URI_PATTERN = r"^(hf|pvc|oci)://[^\s]+$"
INT_OR_PERCENT_PATTERN = r"^(100|[1-9]?[0-9])%$"
RATIO_PATTERN = r"^[1-9][0-9]{0,3}:[1-9][0-9]{0,3}$"
WORD_PATTERN = r"^[^\s]+$"
OBJECT_NAME_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
RESOURCE_NAME_PATTERN = r"^[a-z0-9A-Z]([a-zA-Z0-9./_-]*[a-zA-Z0-9])?$"
QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?([KMGTPE]i?|k)?$"
#: Longest drain that is accepted, in seconds: a day.
MAX_DRAIN_S = 86400
#: Longest time that a router may wait for an answer, in seconds: a day.
MAX_REQUEST_S = 86400

ParallelSize = Annotated[int, Field(ge=1, le=MAX_PARALLEL_SIZE)]
BlockSize = Annotated[int, Field(ge=1, le=MAX_BLOCK_SIZE)]
NonEmpty = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
IntOrPercent = (
    Annotated[int, Field(ge=0, le=MAX_REPLICAS)] | Annotated[str, StringConstraints(pattern=INT_OR_PERCENT_PATTERN)]
)
#: A value that reaches a command line or a pod: something, and nothing that a terminal would interpret.
Word = Annotated[str, StringConstraints(pattern=WORD_PATTERN, max_length=1024)]
#: Name of another object of the namespace.
ObjectName = Annotated[str, StringConstraints(pattern=OBJECT_NAME_PATTERN, max_length=253)]


#: Name of a namespace.
NamespaceName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
#: A Kubernetes quantity of bytes.
ByteQuantity = Annotated[str, StringConstraints(pattern=QUANTITY_PATTERN, max_length=32)]
ResourceName = Annotated[str, StringConstraints(pattern=RESOURCE_NAME_PATTERN, min_length=1, max_length=253)]


#: How a model attends.
Attention = Literal["mla", "gqa"]
ATTENTION_KINDS: tuple[str, ...] = get_args(Attention)
#: How the layers of a model keep KV.
Layout = Literal["full", "sparse", "sliding", "chunked", "linear"]


class Geometry(ApiModel):
    """Facts of the model that decide which parallel sizes are legal."""

    attention: Attention = Field(
        description="Attention kind: mla (one compressed KV head, as in DeepSeek) or gqa (multi-head, grouped and "
        "multi-query attention; kvHeads tells them apart)."
    )
    attention_heads: Annotated[int, Field(ge=1, le=4096)] = Field(
        description="Number of attention (query) heads, num_attention_heads in the model's config.json."
    )
    kv_heads: Annotated[int, Field(ge=1, le=4096)] = Field(
        description="Number of KV heads, num_key_value_heads in config.json; 1 for mla."
    )
    layers: Annotated[int, Field(ge=1, le=4096)] = Field(
        description="Number of decoder layers, num_hidden_layers in config.json."
    )
    max_model_len: Annotated[int, Field(ge=1, le=MAX_MODEL_LEN)] | None = Field(
        default=None, description="Longest context the model supports, in tokens (max_position_embeddings)."
    )
    layout: Layout | None = Field(
        default=None,
        description="What the layers keep: full (every token on every layer), sparse (the same, with an indexer), "
        "sliding or chunked (some layers a window only), linear (some layers a state instead). Absent: as the "
        "catalogue says, else full.",
    )


class ModelCache(ApiModel):
    """A claim into which a model of a hub is pulled once, for all engines."""

    claim_name: ObjectName = Field(
        description="PersistentVolumeClaim of this namespace, mountable by every engine's node (ReadWriteMany, or one "
        "node). A Job pulls the model into it once; engines start when it is there and mount it read-only."
    )
    path: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$", max_length=512)] | None = (
        Field(default=None, description="Folder on the claim; a folder named after the model if absent.")
    )


class Model(ApiModel):
    """The model that both roles serve: stated once."""

    uri: Annotated[str, StringConstraints(pattern=URI_PATTERN, max_length=2048)] = Field(
        description="Where the model comes from: hf://REPOSITORY (Hugging Face), pvc://CLAIM/PATH (a folder on a "
        "PersistentVolumeClaim of this namespace) or oci://IMAGE (an image volume)."
    )
    revision: Word | None = Field(
        default=None, description="Branch, tag or commit of a Hugging Face model; only for hf:// URIs."
    )
    served_name: NonEmpty | None = Field(
        default=None, description="Model name in OpenAI requests; defaults to the object's name."
    )
    auth_secret_name: ObjectName | None = Field(
        default=None,
        description="Secret of this namespace whose key token is the Hugging Face token, for gated models.",
    )
    cache: ModelCache | None = Field(
        default=None,
        description="Pull a Hugging Face model once into a claim, instead of once in every pod; only for hf:// URIs.",
    )
    geometry: Geometry | None = Field(
        default=None,
        description="Heads and layers of the model. Without it the catalogue's numbers hold; for a model that it "
        "doesn't know, the rules that need them are not checked, and ConfigCompatible is Unknown, at least until "
        "engines of both roles run.",
    )


class Accelerator(ApiModel):
    """The device that an engine rank runs on."""

    resource_name: Annotated[str, StringConstraints(pattern=RESOURCE_NAME_PATTERN)] = Field(
        default="nvidia.com/gpu",
        max_length=253,
        description="Extended resource of one accelerator, such as nvidia.com/gpu or amd.com/gpu. The number per pod "
        "is derived from the parallel sizes. cpu means that the engines run on CPU and request no accelerator.",
    )


class Rdma(ApiModel):
    """RDMA devices of an engine pod, as its node's device plugin offers them."""

    resource_name: ResourceName = Field(description="Extended resource of an RDMA device, such as rdma/hca_shared.")
    count: Annotated[int, Field(ge=1, le=64)] = Field(default=1, description="Devices of one engine pod.")


class KVConnector(ApiModel):
    """How KV cache travels from prefill to decode."""

    type: Literal["mooncake", "mooncake-upstream", "nixl"] = Field(
        default="mooncake",
        description="Connector to run: mooncake is the bundled DCPMooncakeConnector, mooncake-upstream vLLM's own "
        "MooncakeConnector, nixl vLLM's NixlConnector. Each takes other pairs of sizes (rule connector-takes-pair).",
    )
    protocol: Literal["rdma", "tcp"] = Field(default="rdma", description="Transport of the KV bytes: rdma or tcp.")
    delivery: Literal["Inject", "Image"] = Field(
        default="Inject",
        description="How the bundled connector reaches the engine: Inject copies it into a stock vLLM image with an "
        "init container; Image expects it to be installed in the image already. The others are part of vLLM.",
    )
    load_failure_policy: Literal["recompute", "fail"] = Field(
        default="recompute",
        description="What becomes of a request whose KV could not be loaded: recompute prefills it on the decode side, "
        "fail ends it with an error (vLLM's kv_load_failure_policy).",
    )
    rdma: Rdma | None = Field(
        default=None,
        description="RDMA devices that every engine pod requests; the pods are never privileged. Only with protocol "
        "rdma.",
    )
    extra_config: dict[str, Any] = Field(
        default_factory=dict,
        description="Further options of the connector, in its own words (kv_connector_extra_config). An unknown key "
        "is refused by the bundled connector and a warning with the others.",
    )


class Parallelism(ApiModel):
    """Parallel sizes of one engine."""

    tensor: ParallelSize = Field(default=1, description="Tensor parallel size (--tensor-parallel-size).")
    pipeline: ParallelSize = Field(
        default=1,
        description="Pipeline parallel size (--pipeline-parallel-size). Which sizes a connector takes: rule "
        "connector-takes-pair.",
    )
    data: ParallelSize = Field(
        default=1,
        description="Data parallel size (--data-parallel-size). All of its ranks run in one pod; 1 with multinode.",
    )
    data_local: ParallelSize | None = Field(
        default=None,
        description="Data parallel ranks in one pod (--data-parallel-size-local); data, which is also the default.",
    )
    expert: bool = Field(
        default=False,
        description="Spread the experts of a mixture-of-experts model over the ranks (--enable-expert-parallel).",
    )
    decode_context: ParallelSize = Field(
        default=1,
        description="Decode context parallel size (--decode-context-parallel-size): over how many ranks the KV cache "
        "of one sequence is sharded by token. Divides tensor.",
    )
    prefill_context: ParallelSize = Field(
        default=1,
        description="Prefill context parallel size (--prefill-context-parallel-size). Which sizes a connector takes: "
        "rule connector-takes-pair.",
    )


class Scaling(ApiModel):
    """Bounds within which an autoscaler owns the replica count."""

    min_replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = Field(
        default=1,
        description="Fewest replicas, and those that a role begins with that runs fewer. 0 lets an autoscaler that can "
        "(KEDA) take the role away; requests are then refused until it comes back.",
    )
    max_replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = Field(description="Most replicas.")


class RestartBackoff(ApiModel):
    """Pauses before a group whose pod failed is made anew: doubled each time, within these bounds."""

    base_delay_seconds: Annotated[int, Field(ge=1, le=3600)] = Field(default=30, description="The first pause.")
    max_delay_seconds: Annotated[int, Field(ge=1, le=86400)] = Field(default=600, description="The longest pause.")


class Multinode(ApiModel):
    """An engine that spans several pods, on nodes of their own: a group of a LeaderWorkerSet."""

    node_count: Annotated[int, Field(ge=2, le=64)] = Field(
        description="Pods of one engine; divides tensor x prefillContext x pipeline. Each gets the same part of the "
        "ranks."
    )
    restart_policy: Literal["RecreateGroupOnPodRestart", "None"] = Field(
        default="RecreateGroupOnPodRestart",
        description="What becomes of the group when a pod of it fails: the whole group is made anew after a pause, or "
        "(None) the pod is left to Kubernetes.",
    )
    restart_backoff: RestartBackoff = Field(
        default_factory=RestartBackoff, description="Pauses before a group is made anew."
    )
    annotations: dict[str, Annotated[str, StringConstraints(max_length=4096)]] = Field(
        default_factory=dict[str, str],
        description="Annotations of the LeaderWorkerSet and its pods, for gang scheduling and exclusive placement, in "
        "the scheduler's own words.",
    )


class DisruptionBudget(ApiModel):
    """How many engines of a role may be evicted at once, for example when nodes are drained."""

    enabled: bool = Field(default=True, description="Whether the role has a PodDisruptionBudget.")
    max_unavailable: IntOrPercent = Field(
        default=1,
        description="Engines that may be away: a number or a percentage. Of an engine with multinode each pod counts. "
        "A role of one engine has no budget.",
    )


class RoleSpec(ApiModel):
    """One role's engines: replicas, sizes, and the pod that runs them."""

    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] | None = Field(
        default=None, description="Number of engines of this role; 1 if neither replicas nor scaling is given."
    )
    scaling: Scaling | None = Field(
        default=None,
        description="Leave the replica count to an autoscaler, within these bounds. Never together with replicas.",
    )
    image: Word | None = Field(
        default=None, description="Engine image of this role alone; spec.image if absent. Both of one vLLM version."
    )
    parallelism: Parallelism = Field(default_factory=Parallelism, description="Parallel sizes of one engine.")
    block_size: BlockSize = Field(default=64, description="Tokens in one KV-cache block of one rank (--block-size).")
    kv_cache_interleave_size: BlockSize | None = Field(
        default=None,
        description="Consecutive tokens that one decode-context rank keeps before the next rank's turn "
        "(--cp-kv-cache-interleave-size). Divides blockSize; defaults to it, so that whole blocks move.",
    )
    dtype: Word | None = Field(
        default=None, description="Data type of weights and activations (--dtype); the engine's default if absent."
    )
    kv_cache_dtype: Word | None = Field(
        default=None, description="Data type of the KV cache (--kv-cache-dtype); the same on both roles."
    )
    max_model_len: Annotated[int, Field(ge=1, le=MAX_MODEL_LEN)] | None = Field(
        default=None,
        description="Longest context this role serves, in tokens (--max-model-len). Decode's is at least prefill's.",
    )
    multinode: Multinode | None = Field(
        default=None,
        description="Run each engine of this role as a group of pods on several nodes. Needs LeaderWorkerSet in the "
        "cluster.",
    )
    host_network: bool = Field(
        default=False,
        description="Use the node's network. Ports are then chosen by the operator, others for each object and "
        "revision; a node takes one engine of a revision, of whichever role. Engines then have no NetworkPolicy.",
    )
    shared_memory_size: ByteQuantity | None = Field(
        default=None,
        description="Size of /dev/shm, such as 16Gi; 0 leaves it to the container runtime. Half of the node's memory "
        "if absent.",
    )
    disruption_budget: DisruptionBudget = Field(
        default_factory=DisruptionBudget, description="How many engines of this role may be evicted at once."
    )
    extra_args: list[Annotated[str, StringConstraints(max_length=4096)]] = Field(
        default_factory=list[str],
        max_length=256,
        description="Further vLLM arguments, appended last. Refused where they contradict a typed field or touch what "
        "the operator owns (ports, KV transfer).",
    )
    template: dict[str, Any] = Field(
        default_factory=dict,
        description="PodTemplateSpec merged under the operator's own: the engine's container is called main. Use it "
        "for node selectors, tolerations, resources, volumes, environment and sidecars.",
    )


class Router(ApiModel):
    """The request router in front of both roles."""

    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = Field(
        default=1, description="Number of router pods of a revision."
    )
    request_timeout_seconds: Annotated[int, Field(ge=1, le=MAX_REQUEST_S)] = Field(
        default=1800,
        description="Longest time for one engine's answer to a request, in seconds: all of it, streamed or not "
        "(--request-timeout-secs). A client waits so long for an engine that never answers, and an answer that takes "
        "longer is cut off. The default is the router's own, half an hour, because the longest answers take minutes.",
    )
    template: dict[str, Any] = Field(
        default_factory=dict,
        description="PodTemplateSpec merged under the operator's own: the router's container is called main.",
    )


class Ratio(ApiModel):
    """Bounds on the number of prefill engines for each decode engine."""

    min: Annotated[str, StringConstraints(pattern=RATIO_PATTERN)] | None = Field(
        default=None, description="Fewest prefill engines per decode engine, as PREFILL:DECODE, such as 1:4."
    )
    max: Annotated[str, StringConstraints(pattern=RATIO_PATTERN)] | None = Field(
        default=None, description="Most prefill engines per decode engine, as PREFILL:DECODE, such as 2:1."
    )


class RolloutStrategy(ApiModel):
    """How a new revision takes over: prefill and decode in paired steps, new ones before old ones go."""

    max_surge: IntOrPercent = Field(
        default=1,
        description="Engines of a role above the wanted number during a rollout: a number, or a percentage (rounded "
        "up). They need spare accelerators.",
    )
    max_unavailable: IntOrPercent = Field(
        default=0,
        description="Engines of a role that may be missing during a rollout: a number, or a percentage (rounded down). "
        "Counted in pairs: the larger share of the two roles may be missing of both, because a prefill engine "
        "without its decode engine serves nobody.",
    )
    max_skew: (
        Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
        | Annotated[str, StringConstraints(pattern=INT_OR_PERCENT_PATTERN)]
        | None
    ) = Field(
        default=None,
        description="Engines of a role that the new revision may have beyond what its ready engines of the other role "
        "pair with: a number, or a percentage (rounded up, at least 1). Absent: as many as maxSurge allows.",
    )


class NetworkPolicy(ApiModel):
    """Who may connect to the object's pods, as NetworkPolicies; the cluster's network has to enforce them."""

    enabled: bool = Field(
        default=True,
        description="Whether the object has NetworkPolicies: KV transfer only between its own pods, engines' HTTP only "
        "from its routers, the operator and the namespaces named.",
    )
    allowed_namespaces: list[NamespaceName] | None = Field(
        default=None,
        max_length=64,
        description="Namespaces whose pods may talk to routers and engines by HTTP, for example that of Prometheus. "
        "Absent: routers take requests from everywhere, engines from the object and the operator only. Given: routers "
        "take them from the object's own namespace, the operator and these namespaces only. With router.replicas 0 the "
        "object's own namespace and these reach the engines by HTTP and, with a Mooncake connector, the bootstrap "
        "servers that a router of your own asks.",
    )


class TransferCheck(ApiModel):
    """The proof that KV moves: a small prompt through the router, judged by the engines' own counters."""

    enabled: bool = Field(
        default=True, description="Whether the check is made; without it KVTransferVerified stays Unknown."
    )
    interval_seconds: Annotated[int, Field(ge=60, le=604800)] | None = Field(
        default=None,
        description="Seconds between checks, beside those after a rollout and after engines restarted; absent: no "
        "others.",
    )


class TopologyConstraint(ApiModel):
    """Where the engines of both roles are placed with regard to one another."""

    topology_key: Annotated[str, StringConstraints(min_length=1, max_length=317)] = Field(
        description="Label of nodes that names their domain, such as topology.kubernetes.io/zone or that of a rack."
    )
    enforcement: Literal["Required", "Preferred"] = Field(
        default="Preferred",
        description="Required: all engines of a revision in one domain, or they stay Pending. Preferred: if possible.",
    )


class Spec(ApiModel):
    """What a DCPDisaggDeployment runs."""

    model: Model = Field(description="The model that both roles serve.")
    image: Word = Field(description="Engine image of the roles, such as vllm/vllm-openai:v0.33.0.")
    accelerator: Accelerator = Field(
        default_factory=Accelerator, description="The device that engine ranks run on; nvidia.com/gpu by default."
    )
    kv_connector: KVConnector = Field(
        default_factory=KVConnector, description="How KV cache travels from prefill to decode."
    )
    prefill: RoleSpec = Field(description="Engines that compute prompts.")
    decode: RoleSpec = Field(description="Engines that generate tokens from the prompts' KV cache.")
    ratio: Ratio | None = Field(
        default=None,
        description="Bounds on prefill engines per decode engine. Admission refuses replicas and scaling bounds that "
        "can't meet them.",
    )
    router: Router = Field(default_factory=Router, description="The request router in front of both roles.")
    rollout_strategy: RolloutStrategy = Field(
        default_factory=RolloutStrategy, description="How a new revision takes over from the old one."
    )
    paused: bool = Field(
        default=False,
        description="Hold rollouts: nothing of a new revision is made, nothing of an old one goes, and no workload "
        "gets another template. Scaling goes on, by the revision that serves most.",
    )
    revision_history_limit: Annotated[int, Field(ge=0, le=100)] = Field(
        default=10, description="Earlier states that are kept for dcpctl rollout history and undo."
    )
    drain_timeout_seconds: Annotated[int, Field(ge=0, le=MAX_DRAIN_S)] = Field(
        default=60,
        description="How long an engine that goes waits for its running requests, in seconds. KV that was computed for "
        "the other role is kept for the connector's lease beyond that.",
    )
    network_policy: NetworkPolicy = Field(
        default_factory=NetworkPolicy, description="Who may connect to the object's pods."
    )
    transfer_check: TransferCheck = Field(default_factory=TransferCheck, description="The proof that KV moves.")
    topology_constraint: TopologyConstraint | None = Field(
        default=None, description="Keep the engines of a revision in one domain of the cluster."
    )
