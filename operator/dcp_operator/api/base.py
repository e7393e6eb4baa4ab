"""What every model of the API shares: camelCase on the wire, unknown fields refused, values frozen."""

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

GROUP = "dcpdisagg.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "DCPDisaggDeployment"
PLURAL = "dcpdisaggdeployments"
SINGULAR = "dcpdisaggdeployment"
SHORT_NAME = "dcpd"
SCALER_KIND = "DCPDisaggRoleScaler"
SCALER_PLURAL = "dcpdisaggrolescalers"
SCALER_SINGULAR = "dcpdisaggrolescaler"
SCALER_SHORT_NAME = "dcpds"


class ApiModel(BaseModel):
    """Base of all API types."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        extra="forbid",
        frozen=True,
        strict=True,
    )
