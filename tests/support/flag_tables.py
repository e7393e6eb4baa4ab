"""Writes the tables of vLLM's flags: `python -m tests.support.flag_tables`.

Each is what the parser of one supported version says of itself, on a machine that looks like one with GPUs.
"""

import json
from pathlib import Path
from typing import Any

from devcluster.paths import CHECKOUT
from tests.support.vllm_process import VERSIONS, vllm_process

FOLDER = CHECKOUT / "operator" / "dcp_operator" / "flags"


def table_file(version: str) -> Path:
    """Return where the table of a version is checked in."""
    return FOLDER / f"vllm-{version}.json"


def table_text(table: dict[str, Any]) -> str:
    """Return a table as the text of its file: one flag per line, so that a new version reads as a diff."""
    lines = ",\n".join("  " + json.dumps(row) for row in table["flags"])
    return f'{{"vllm": {json.dumps(table["vllm"])}, "flags": [\n{lines}\n]}}\n'


def main() -> None:
    """Write all tables."""
    for version in VERSIONS:
        table_file(version).write_text(table_text(vllm_process(version).ask("table")))
        print(f"wrote {table_file(version).relative_to(CHECKOUT)}")


if __name__ == "__main__":
    main()
