"""Entry point of ``python -m devcluster``."""

import sys

_OLDEST_PYTHON = (3, 11)


def _missing() -> str:
    """What this interpreter lacks, in words; "" when it can run the tool."""
    if sys.version_info < _OLDEST_PYTHON:
        return f"Python 3.11 or newer is needed, and {sys.executable} is {sys.version.split()[0]}"
    try:
        import yaml  # noqa: F401 - only asked for its presence
    except ModuleNotFoundError:
        return f"{sys.executable} has no PyYAML: run it as .venv/bin/python -m devcluster, after `uv sync`"
    return ""


def _main() -> int:
    if missing := _missing():
        print(f"devcluster: {missing}", file=sys.stderr)
        return 2
    from devcluster.cli import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(_main())
