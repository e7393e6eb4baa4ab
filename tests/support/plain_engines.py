"""The engines that the page about the connector without the operator starts, as flags and values."""

import shlex

from tests.support.markdown import ROOT, blocks

HOW_TO = ROOT / "docs/how-to/connector-without-operator.md"


def served_arguments() -> list[list[str]]:
    """Return the arguments of each `vllm serve MODEL ...` of the page, with the model as a flag."""
    found: list[list[str]] = []
    for block in blocks(HOW_TO.read_text()):
        _, command, rest = block.text.partition("vllm serve ")
        if command:
            found.append(["--model", *shlex.split(rest.replace("\\\n", " "))])
    return found


def served_engines() -> list[dict[str, str]]:
    """Return the same as values by flag; every flag of the page has one value."""
    return [dict(zip(words[::2], words[1::2], strict=True)) for words in served_arguments()]
