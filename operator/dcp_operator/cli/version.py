"""The version of the installed distribution."""

from importlib import metadata


def version() -> str:
    """Return the version, or `unknown` where the package runs without having been installed."""
    try:
        return metadata.version("dcp-disagg")
    except metadata.PackageNotFoundError:
        return "unknown"
