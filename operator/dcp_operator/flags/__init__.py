"""vLLM's command line, read as vLLM reads it: which flags `extraArgs` holds, in any spelling, and what they say."""

from dcp_operator.flags.convert import AUTO, BadValueError
from dcp_operator.flags.parse import Flag, Problem, ProblemKind, Reading, flag_value, read_arguments
from dcp_operator.flags.table import FlagSpec, FlagTable, known_flags, versions_with
from dcp_operator.flags.versions import SUPPORTED, image_version

__all__ = [
    "AUTO",
    "SUPPORTED",
    "BadValueError",
    "Flag",
    "FlagSpec",
    "FlagTable",
    "Problem",
    "ProblemKind",
    "Reading",
    "flag_value",
    "image_version",
    "known_flags",
    "read_arguments",
    "versions_with",
]
