"""Starts and stops CPU engines as processes of this machine, for tests that need no cluster.

    pool.get(EngineSpec(tensor=2, dcp=2, interleave=8)).url

An engine takes about 20 s to start and 2 to 3 GB, so tests share them through `EnginePool`, which keeps at most two,
or as many as one test asks for at once.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from dcp_connector.config import SECRET_FILE_ENV, ConnectorConfig, kv_transfer_config
from devcluster.completions import complete_all
from devcluster.engine import ensure_engine_environment, ensure_models, profile
from devcluster.paths import CHECKOUT, this_cache
from tests.support.ports import first_of_free_ports, free_ports
from tests.support.process_groups import ProcessGroup

__all__ = [
    "EnginePool",
    "EngineSpec",
    "RunningEngine",
    "engine_pool",
    "running_engine",
]

START_TIMEOUT_S = 240.0
_HOST = "127.0.0.1"
#: `vllm serve --headless`. Its command line does not start here: it asks for the version of a distribution named vllm,
#: and that of the CPU engines has another name.
_HEADLESS = """
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

ServeSubcommand.cmd(make_arg_parser(FlexibleArgumentParser()).parse_args())
"""
_SECRET = "0123456789abcdef0123456789abcdef"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is. Equal specs mean the same engine."""

    model: str = "tiny-mqa"
    tensor: int = 1
    dcp: int = 1
    interleave: int = 1
    #: Rows of a rank's block.
    block: int = 32
    #: Data-parallel ranks; each has a bootstrap port of its own, one behind the other.
    data: int = 1
    #: Nodes: processes with addresses of their own, 127.0.0.1, 127.0.0.2 and so on, each with its part of the ranks.
    nodes: int = 1
    #: With a role the engine runs the connector; its ports are chosen when it starts.
    role: Literal["kv_producer", "kv_consumer", "kv_both"] | None = None
    load_failure_policy: Literal["recompute", "fail"] = "fail"
    #: Fields of ConnectorConfig, as (name, value) pairs.
    connector: tuple[tuple[str, Any], ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    args: tuple[str, ...] = ()

    def __str__(self) -> str:
        layout = f"tp{self.tensor}-dcp{self.dcp}-i{self.interleave}" if self.dcp > 1 else f"tp{self.tensor}"
        block = f"-b{self.block}" if self.block != 32 else ""
        nodes = f"-n{self.nodes}" if self.nodes > 1 else ""
        return f"{self.model}-{layout}{block}{nodes}" + (f"-{self.role}" if self.role else "")


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine that was started; `wait` says when it serves."""

    spec: EngineSpec
    url: str
    bootstrap_url: str | None
    group: ProcessGroup
    #: Those of the other nodes.
    others: tuple[ProcessGroup, ...] = ()

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> "RunningEngine":
        """Return when the engine is healthy, and its connector too if it has one."""
        self.group.wait_for_http(f"{self.url}/health", timeout_s)
        if self.bootstrap_url:
            self.group.wait_for_http(f"{self.bootstrap_url}/readyz", 60.0)
        return self

    def log(self) -> str:
        """What the engine has written so far."""
        return self.group.log_file.read_text(errors="replace")

    def stop(self) -> None:
        """End the engine on all of its nodes."""
        for group in (self.group, *self.others):
            group.stop()


def start_engine(spec: EngineSpec, folder: Path) -> RunningEngine:
    """Start an engine without waiting for it. `folder` receives its log and its secret."""
    cache = this_cache().root
    environment = ensure_engine_environment(cache, print)
    models = ensure_models(cache, print)
    port, bootstrap_port = free_ports(2)
    if spec.data > 1:
        bootstrap_port = first_of_free_ports(spec.data)
    command = profile.arguments(
        models / spec.model,
        served_model_name="tiny",
        host=_HOST,
        port=port,
        tensor=spec.tensor,
        dcp=spec.dcp,
        interleave=spec.interleave,
    )
    command.append(f"--block-size={spec.block}")  # the last one counts
    command += [f"--data-parallel-size={spec.data}"] if spec.data > 1 else []
    variables = {**os.environ, **profile.environment(environment), "VLLM_HOST_IP": _HOST}
    variables.pop("PYTHONPATH", None)
    if spec.role:
        secret = folder / "secret"
        secret.write_text(_SECRET)
        options = {"mooncake_protocol": "tcp", "bootstrap_port": bootstrap_port, "api_port": port}
        config = ConnectorConfig(**{**options, **dict(spec.connector)})
        transfer = kv_transfer_config(spec.role, config, load_failure_policy=spec.load_failure_policy)
        command.append(f"--kv-transfer-config={json.dumps(transfer)}")
        variables |= {
            "PYTHONPATH": str(CHECKOUT / "connector"),
            SECRET_FILE_ENV: str(secret),
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap_port),
        }
    variables |= dict(spec.env)
    command += [*spec.args, *_nodes_arguments(spec)]
    python = str(environment / "bin" / "python3")
    server = [python, "-m", profile.API_SERVER, *command]
    if spec.nodes > 1:
        server.append("--node-rank=0")
    log = folder / f"{spec}-{port}.log"
    group = ProcessGroup.start(server, variables, log)
    others = tuple(
        ProcessGroup.start(
            [python, "-c", _HEADLESS, *command, "--headless", f"--node-rank={rank}"],
            {**variables, "VLLM_HOST_IP": f"127.0.0.{rank + 1}"},
            log.with_suffix(f".{rank}.log"),
        )
        for rank in range(1, spec.nodes)
    )
    return RunningEngine(
        spec=spec,
        url=f"http://{_HOST}:{port}",
        bootstrap_url=f"http://{_HOST}:{bootstrap_port}" if spec.role else None,
        group=group,
        others=others,
    )


def _nodes_arguments(spec: EngineSpec) -> list[str]:
    if spec.nodes == 1:
        return []
    (port,) = free_ports(1)
    return [f"--nnodes={spec.nodes}", f"--master-addr={_HOST}", f"--master-port={port}"]


@contextmanager
def running_engine(spec: EngineSpec, folder: Path) -> Iterator[RunningEngine]:
    """Run one engine for the length of a block, for tests that break it."""
    engine = start_engine(spec, folder)
    try:
        yield engine.wait()
    finally:
        engine.stop()


class EnginePool:
    """Engines that tests share. At most `limit` live, or as many as one call names.

    The one that was not asked for the longest makes room.
    """

    def __init__(self, folder: Path, limit: int = 2) -> None:
        self._folder = folder
        self._limit = limit
        self._engines: OrderedDict[EngineSpec, RunningEngine] = OrderedDict()
        self._answers: dict[tuple[EngineSpec, str, int], tuple[int, ...]] = {}

    def get(self, *specs: EngineSpec) -> tuple[RunningEngine, ...]:
        """Return engines that serve, one for each spec; those that don't run yet start side by side."""
        limit = max(self._limit, len(set(specs)))
        for spec in specs:
            if spec in self._engines:
                self._engines.move_to_end(spec)
        wanted = [spec for spec in dict.fromkeys(specs) if spec not in self._engines]
        surplus = len(self._engines) + len(wanted) - limit
        if wanted and surplus > 0:
            self.stop(*list(self._engines)[:surplus])
        for spec in wanted:
            self._engines[spec] = start_engine(spec, self._folder)
        return tuple(self._wait(spec) for spec in specs)

    def answers(
        self, spec: EngineSpec, prompts: Sequence[str], *, max_tokens: int = 24, concurrency: int = 4
    ) -> list[tuple[int, ...]]:
        """Return the greedy tokens of an engine for prompts. Asks only what was not asked yet of an equal engine.

        So the answers of a plain engine outlive the engine, and a repeated prompt is asked once: answers from the
        prefix cache are for tests of their own.
        """
        wanted = [p for p in dict.fromkeys(prompts) if (spec, p, max_tokens) not in self._answers]
        if wanted:
            (engine,) = self.get(spec)
            got = complete_all(engine.url, wanted, max_tokens=max_tokens, concurrency=concurrency)
            for prompt, completion in zip(wanted, got, strict=True):
                self._answers[spec, prompt, max_tokens] = completion.token_ids
        return [self._answers[spec, prompt, max_tokens] for prompt in prompts]

    def stop(self, *specs: EngineSpec) -> None:
        """Stop these engines, or all."""
        stopped = [self._engines.pop(spec, None) for spec in dict.fromkeys(specs or tuple(self._engines))]
        with ThreadPoolExecutor(8) as threads:
            for _ in threads.map(lambda engine: engine.stop(), filter(None, stopped)):
                pass

    def _wait(self, spec: EngineSpec) -> RunningEngine:
        try:
            return self._engines[spec].wait()
        except BaseException:
            self.stop(spec)
            raise


@pytest.fixture(scope="session")
def engine_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    """Engines for the whole session; import this name in a conftest to use it."""
    pool = EnginePool(tmp_path_factory.mktemp("engines"))
    try:
        yield pool
    finally:
        pool.stop()
