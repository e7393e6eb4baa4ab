"""vLLM's command line, read as vLLM reads it: which flags `extraArgs` holds, in any spelling, and what they say."""

from dcp_operator.flags.parse import Flag, Problem, ProblemKind, Reading, read_arguments
from dcp_operator.flags.table import FlagTable, known_flags

__all__ = ["Flag", "FlagTable", "Problem", "ProblemKind", "Reading", "known_flags", "read_arguments"]
