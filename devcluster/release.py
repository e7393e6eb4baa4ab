"""The operator in the local cluster: its image, and its release made by the real Helm."""

import tomllib

from devcluster import buildah, images
from devcluster.paths import CHECKOUT, Cache
from devcluster.progress import Log
from devcluster.tools import Tools

RELEASE = "dcp-disagg"
NAMESPACE = "dcp-system"
CHART = CHECKOUT / "charts" / "dcp-disagg"
DOCKERFILE = CHECKOUT / "docker" / "operator.Dockerfile"


def version() -> str:
    """Return the project's version: the image's tag and the chart's appVersion."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    return str(project["project"]["version"])


def operator_image() -> str:
    """Return the operator image's name."""
    return f"dcp-disagg/operator:{version()}"


def load_operator_image(cache: Cache, log: Log) -> str:
    """Build the operator image from this checkout and load it into the cluster. Returns its name."""
    image = operator_image()
    buildah.build_image(cache, DOCKERFILE, CHECKOUT, image, [], log)
    return image


def install(cache: Cache, tools: Tools, log: Log) -> None:
    """Install or upgrade the chart; returns when its pods are ready and run the image that was loaded last.

    The image keeps its name from build to build, so its digest goes into an annotation: older pods are replaced.
    """
    built = images.digest(cache.cluster, f"docker.io/{operator_image()}")
    log(f"helm upgrade --install {RELEASE} charts/dcp-disagg --namespace {NAMESPACE} --create-namespace --wait")
    tools.helm(
        *("upgrade", "--install", RELEASE, CHART, "--namespace", NAMESPACE, "--create-namespace"),
        *("--set-string", f"podAnnotations.image-digest={built}", "--wait", "--timeout=180s"),
    )


def deploy(cache: Cache, log: Log) -> Tools:
    """Bring this checkout's operator into the running cluster: image, then release. Returns the cluster's tools."""
    load_operator_image(cache, log)
    tools = Tools(cache)
    install(cache, tools, log)
    return tools


def uninstall(tools: Tools, log: Log) -> None:
    """Remove the release; the objects' definition stays, as the chart says."""
    log(f"helm uninstall {RELEASE} --namespace {NAMESPACE} --wait")
    tools.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--ignore-not-found", "--timeout=180s")
