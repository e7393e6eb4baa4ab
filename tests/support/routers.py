"""vllm-router as a process of this machine, with the engines given to it one by one.

It comes from the dependency group `router` of uv.lock, as in the operator image, into an environment of its own.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from devcluster.engine.environment import find_uv
from devcluster.engine.recipe import content_key
from devcluster.files import ensure_folder
from devcluster.paths import CHECKOUT, this_cache
from devcluster.shell import run
from tests.support.ports import free_ports
from tests.support.process_groups import ProcessGroup

__all__ = ["router_python", "running_router"]


class Backend(Protocol):
    """An engine as a router sees it."""

    url: str
    bootstrap_url: str | None


def router_python() -> Path:
    """Return a Python interpreter that has the locked router."""
    return _environment() / "bin" / "python"


@contextmanager
def running_router(
    kv_connector: str, prefills: Sequence[Backend], decodes: Sequence[Backend], folder: Path, *arguments: str
) -> Iterator[str]:
    """Run a router between these engines for the length of a block, with further `arguments`. Gives its address.

    `kv_connector` is "nixl" for the serial flow or "mooncake" for the concurrent one.
    """
    port, metrics_port = free_ports(2)
    # The module and not the script beside it, whose first line names the folder where the environment was made.
    command = [str(router_python()), "-m", "vllm_router.launch_router"]
    command += ["--host=127.0.0.1", f"--port={port}"]
    command += ["--vllm-pd-disaggregation", f"--kv-connector={kv_connector}", "--policy=round_robin"]
    command += ["--prometheus-host=127.0.0.1", f"--prometheus-port={metrics_port}"]
    # The engines serve already, so a second look comes soon; a retry would hide a request that failed.
    command += ["--worker-startup-check-interval=1", "--disable-retries", *arguments]
    for engine in prefills:
        command += ["--prefill", engine.url, str(engine.bootstrap_url).rpartition(":")[2]]
    for engine in decodes:
        command += ["--decode", engine.url]
    group = ProcessGroup.start(command, dict(os.environ), folder / f"router-{kv_connector}-{port}.log")
    try:
        group.wait_for_http(f"http://127.0.0.1:{port}/readiness", 60.0)
        yield f"http://127.0.0.1:{port}"
    finally:
        group.stop()


def _environment() -> Path:
    """Return the environment with the locked router, made if it is not there: some seconds."""
    cache = this_cache()
    lock, project = CHECKOUT / "uv.lock", CHECKOUT / "pyproject.toml"
    target = cache.root / "router" / content_key({file.name: file.read_bytes() for file in (lock, project)})

    def make(partial: Path) -> None:
        run(
            [find_uv(cache.root), "sync", "--frozen", "--only-group", "router", "--project", CHECKOUT],
            what="installing vllm-router",
            env={"UV_PROJECT_ENVIRONMENT": str(partial), "VIRTUAL_ENV": ""},
        )

    ensure_folder(target, make, print, "vllm-router", cache.locks / "router.lock")
    return target
