"""The whole object: what `kubectl apply` sends and what the operator reads back, without its status."""

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from dcp_operator.api.base import API_VERSION, KIND
from dcp_operator.api.spec import Spec


class Metadata(BaseModel):
    """The parts of ObjectMeta that rules and builders read; everything else is the API server's business."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, extra="ignore", frozen=True, strict=True)

    name: str = ""
    generate_name: str = ""
    namespace: str = ""
    uid: str = ""
    generation: int | None = None


class DCPDisaggDeployment(BaseModel):
    """A DCPDisaggDeployment that passed its schema. `status` is left out: no decision is taken from it."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, extra="ignore", frozen=True, strict=True)

    api_version: str = API_VERSION
    kind: str = KIND
    metadata: Metadata = Field(default_factory=Metadata)
    spec: Spec
