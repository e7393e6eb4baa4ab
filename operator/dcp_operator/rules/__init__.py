"""Admission rules: pure functions from an object to findings, the same for webhook, reconciler and command line."""

from dcp_operator.rules.engine import RULES, Report, check, check_body, explain, rule_ids

__all__ = ["RULES", "Report", "check", "check_body", "explain", "rule_ids"]
