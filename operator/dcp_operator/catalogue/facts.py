"""What the catalogue knows of one model: the numbers of its config.json that decide which sizes are legal and how large
its KV cache is."""

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from dcp_operator.api.base import ApiModel
from dcp_operator.api.spec import MAX_MODEL_LEN, Geometry, Layout

Size = Annotated[int, Field(ge=1, le=4096)]
Name = Annotated[str, StringConstraints(pattern=r"^[^\s]+$", max_length=2048)]


class ModelFacts(ApiModel):
    """One model. `names` are Hugging Face repositories, or whole URIs as spec.model.uri states them."""

    names: Annotated[list[Name], Field(min_length=1, max_length=100)]
    attention: Literal["mla", "gqa"]
    attention_heads: Size
    kv_heads: Size
    layers: Size
    #: Elements of one key (and of one value) of one KV head; of a latent model see `kv_lora_rank`.
    head_size: Size | None = None
    kv_lora_rank: Size | None = None
    qk_rope_head_dim: Size | None = None
    layout: Layout = "full"
    #: max_position_embeddings; left out where no copy of config.json states it.
    max_model_len: Annotated[int, Field(ge=1, le=MAX_MODEL_LEN)] | None = None
    #: Where the numbers are from.
    source: Annotated[str, StringConstraints(max_length=2048)] = ""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if self.attention == "mla":
            if self.kv_heads != 1:
                raise ValueError("kvHeads must be 1 with attention mla, which caches one compressed head")
            if self.kv_lora_rank is None or self.qk_rope_head_dim is None:
                raise ValueError("kvLoraRank and qkRopeHeadDim are required with attention mla")
        else:
            if self.head_size is None:
                raise ValueError("headSize is required with attention gqa")
            if self.attention_heads % self.kv_heads:
                raise ValueError(f"kvHeads {self.kv_heads} must divide attentionHeads {self.attention_heads}")
        return self

    @property
    def geometry(self) -> Geometry:
        """The facts in the words of spec.model.geometry."""
        return Geometry(
            attention=self.attention,
            attention_heads=self.attention_heads,
            kv_heads=self.kv_heads,
            layers=self.layers,
            max_model_len=self.max_model_len,
            layout=self.layout,
        )

    @property
    def keeps_every_token(self) -> bool:
        """Whether every layer caches every token: decode context parallelism can shard no other."""
        return self.layout in ("full", "sparse")
