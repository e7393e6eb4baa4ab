"""Where a model comes from: the engine's arguments, the volume and the environment that `model.uri` asks for."""

from dataclasses import dataclass, field
from typing import Any

from dcp_operator import names
from dcp_operator.api.spec import Model

#: Key of the Secret named by model.authSecretName.
TOKEN_KEY = "token"  # noqa: S105 - the name of a key, not a secret


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What one engine pod needs to find the model."""

    #: Value of --model: a repository's name, or a folder in the container.
    reference: str
    #: Value of --revision, for models of a hub.
    revision: str | None = None
    volume: dict[str, Any] | None = None
    env: tuple[dict[str, Any], ...] = field(default=())
    #: Environment that the user's template may override.
    default_env: tuple[dict[str, Any], ...] = field(default=())


def model_source(model: Model) -> ModelSource:
    """Return what `model.uri` asks for: hf://REPOSITORY, pvc://CLAIM[/PATH] or oci://IMAGE."""
    scheme, _, rest = model.uri.partition("://")
    if scheme == "hf":
        return ModelSource(reference=rest, revision=model.revision, env=_token(model))
    # The model is on a volume: the engine has no reason to ask a hub, and a pod without a way out would wait for it.
    offline = ({"name": "HF_HUB_OFFLINE", "value": "1"},)
    if scheme == "pvc":
        claim, _, path = rest.partition("/")
        source: dict[str, Any] = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    else:
        path = ""
        source = {"image": {"reference": rest, "pullPolicy": "IfNotPresent"}}
    folder = f"{names.PATH_MODELS}/{path.strip('/')}".rstrip("/")
    return ModelSource(
        reference=folder, volume={"name": names.VOLUME_MODEL, **source}, env=_token(model), default_env=offline
    )


def _token(model: Model) -> tuple[dict[str, Any], ...]:
    if model.auth_secret_name is None:
        return ()
    key = {"name": model.auth_secret_name, "key": TOKEN_KEY}
    return ({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}},)
