"""kubectl and helm, bound to the local cluster."""

from pathlib import Path

from devcluster.clients import client_environment, clients_folder
from devcluster.paths import Cache
from devcluster.shell import run


class Tools:
    """Runs the cached kubectl and helm on the local cluster; a failure is a DevClusterError with their words."""

    def __init__(self, cache: Cache) -> None:
        self._folder = clients_folder(cache)
        self._environment = client_environment(cache) | {"NO_PROXY": "*", "no_proxy": "*"}

    def kubectl(self, *arguments: str | Path, stdin: str | None = None, timeout_s: float = 120.0) -> str:
        """Run kubectl and return what it printed on standard output."""
        return self._run("kubectl", arguments, stdin, timeout_s)

    def helm(self, *arguments: str | Path, timeout_s: float = 300.0) -> str:
        """Run helm and return what it printed on standard output."""
        return self._run("helm", arguments, None, timeout_s)

    def _run(self, program: str, arguments: tuple[str | Path, ...], stdin: str | None, timeout_s: float) -> str:
        return run(
            [self._folder / program, *arguments],
            what=f"{program} {' '.join(str(part) for part in arguments[:3])}",
            stdin=stdin,
            env=self._environment,
            timeout_s=timeout_s,
            quote=str.strip,  # a refusal has a line for each finding
        )
