"""`dcpctl`, and the same as a kubectl plugin: `kubectl dcpd`."""

from dcp_operator.cli.main import main

__all__ = ["main"]
