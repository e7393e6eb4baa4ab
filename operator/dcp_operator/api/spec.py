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
    geometry: Geometry | None = Field(
        default=None,
        description="Heads and layers of the model. Without it the rules that need them are not checked and "
        "ConfigCompatible stays Unknown.",
    )


class Accelerator(ApiModel):
    """The device that an engine rank runs on."""

    resource_name: Annotated[str, StringConstraints(pattern=RESOURCE_NAME_PATTERN)] = Field(
        default="nvidia.com/gpu",
        max_length=253,
        description="Extended resource of one accelerator, such as nvidia.com/gpu or amd.com/gpu. The number per pod "
        "is derived from the parallel sizes. cpu means that the engines run on CPU and request no accelerator.",
    )


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
        description="Data parallel size (--data-parallel-size). Which sizes a connector takes: rule "
        "connector-takes-pair.",
    )
    data_local: ParallelSize | None = Field(
        default=None,
        description="Data parallel ranks in one pod (--data-parallel-size-local); defaults to data.",
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

    min_replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = Field(
        default=1, description="Fewest replicas; also the number that a new revision starts with."
    )
    max_replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = Field(description="Most replicas.")


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
    """How the pods of a revision replace one another."""

    max_surge: IntOrPercent = Field(
        default=1,
        description="Engines of a role above the wanted number while pods of one revision are replaced: a number or a "
        "percentage. A new revision always starts whole, beside the old one.",
    )
    max_unavailable: IntOrPercent = Field(
        default=0,
        description="Engines of a role that may be missing while pods of one revision are replaced: a number or a "
        "percentage. A new revision always starts whole, beside the old one.",
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
        default_factory=RolloutStrategy, description="How the pods of a revision replace one another."
    )
