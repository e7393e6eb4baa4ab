"""Faults of the local cluster's own components, and what to wait for afterwards."""

import os
import signal
import subprocess
import time

from devcluster import api, processes
from devcluster.components import APISERVER
from devcluster.paths import this_cache
from devcluster.settings import APISERVER as APISERVER_PORT
from devcluster.shell import last_words
from tests.support.operator_process import wait_for

#: What was started here outlives the tests, and is held so that nobody complains of it meanwhile.
_STARTED: list[subprocess.Popen[bytes]] = []


def kill_api_server(down_s: float = 0.0) -> None:
    """Kill the API server, which cuts all watches; start it again after a time and return when it answers."""
    paths = this_cache().cluster
    record = processes.load_records(paths.records)[APISERVER]
    os.kill(record.pid, signal.SIGKILL)
    wait_for("the API server is gone", lambda: not processes.is_alive(record), 10, every_s=0.05)
    time.sleep(down_s)
    log_file = paths.logs / f"{APISERVER}.log"
    server = processes.start(APISERVER, record.argv, record.digest, log_file, paths.records, {})
    _STARTED.append(server)
    health = f"https://{APISERVER_PORT.address}:{APISERVER_PORT.number}/readyz"

    def answers() -> bool:
        assert server.poll() is None, f"the API server has ended: {last_words(log_file.read_text(errors='replace'))}"
        return api.answers(paths, health)

    wait_for("the API server answers", answers, 60)
