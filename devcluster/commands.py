"""How every command ends: its exit code, or one sentence on standard error and a traceback only in a file."""

import os
import sys
import time
import traceback
from collections.abc import Callable

from devcluster.errors import DevClusterError
from devcluster.paths import Cache

#: Exit code of a step that can't go on.
FAILED = 2


def guarded(name: str, cache: Cache, work: Callable[[], int]) -> int:
    """Run a command and return its exit code. `name` is what the user typed."""
    try:
        return work()
    except DevClusterError as error:
        print(f"{name}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"{name}: interrupted; the next run goes on from here", file=sys.stderr)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:  # the last handler: nobody is shown a traceback
        print(f"{name}: {_unexpected(cache, error)}", file=sys.stderr)
    return FAILED


def _unexpected(cache: Cache, error: Exception) -> str:
    text = traceback.format_exc()
    path = cache.crashes / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError:
        return f"unexpected error: {type(error).__name__}: {error}"
    return f"unexpected error: {type(error).__name__}: {error}; the details are in {path}"
