"""The check that KV moves: what is due, what is asked for, what the counters of both sides say about it. Pure.

`dcp_operator.canary_http` asks, `dcp_operator.canary_checks` keeps the results. Why it is judged so is in
docs/adr/0015-what-the-transfer-check-proves.md.
"""
