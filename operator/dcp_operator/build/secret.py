"""The Secret with the control channel's key, shared by all engines of the object."""

from dcp_operator import names
from dcp_operator.build.objects import Context, Manifest, metadata


def build_key_secret(context: Context) -> Manifest:
    """Return the Secret. The key is given, never made here: it comes from `dcp_operator.target`."""
    result: Manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(context, names.key_secret(context.name)),
        "type": "Opaque",
    }
    if context.kv_key is not None:
        result["data"] = {names.SECRET_KEY: context.kv_key}
    return result
