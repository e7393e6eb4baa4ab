"""`dcpctl explain`: rules in words."""

import difflib

from dcp_operator.cli.problems import CliError
from dcp_operator.rules import explain, rule_ids


def explain_rule(rule: str | None) -> str:
    """Return the text of one rule, or the list of all. Raises CliError for an id that no rule has."""
    if rule is None:
        width = max(map(len, rule_ids()))
        return "\n".join(f"{each:<{width}}  {_first_line(each)}" for each in rule_ids())
    text = explain(rule)
    if text is None:
        near = difflib.get_close_matches(rule, rule_ids(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else "without an id, explain lists all rules"
        raise CliError(f"there is no rule {rule}; {hint}")
    return f"{rule}\n\n{text}"


def _first_line(rule: str) -> str:
    return (explain(rule) or "").partition("\n")[0]
