"""What tests of the operator on the real API server share: a cluster without a release, a namespace, a controller.

Each file has its own; one that needs them otherwise states fixtures of the same names.
"""

from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, cluster
from tests.support.operator_process import Process, controller, without_release


@pytest.fixture(scope="module")
def real() -> Iterator[Cluster]:
    with without_release(cluster()) as found:
        yield found


@pytest.fixture(scope="module")
def namespace(real: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    with real.namespace(request.path.stem.removeprefix("test_").replace("_", "-")) as name:
        yield name


@pytest.fixture(scope="module")
def operator(real: Cluster, namespace: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with controller(real, tmp_path_factory.mktemp("controller"), namespace) as process:
        yield process
