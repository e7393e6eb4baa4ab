"""Answers questions about the vLLM that it is started with: one JSON request per line in, one JSON answer per line out.

    python main.py      run by the engine environment's Python, with PYTHONPATH naming another release's source, or not

    {"op": "version"}                    -> "0.32.0"
    {"op": "table"}                      -> the flag table of the parser, as `flag_parser.table` describes it
    {"op": "read", "cases": [[...]]}     -> for each list of arguments what the parser makes of it
    {"op": "judge", "cases": [{...}]}    -> for each engine whether vLLM's own configuration takes it
    {"op": "meet", "cases": [{...}]}     -> for each pair of engines whether vLLM's own connector takes it

It imports vLLM and is therefore never imported by a test: `tests.support.vllm_process` starts it.
"""

import json
import os
import sys


def main() -> None:
    # vLLM and the libraries below it print to the standard output now and then; the answers keep it to themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import hopper

    version = hopper.install()
    import connector_checks
    import engine_config
    import flag_parser

    parser = flag_parser.build()
    for line in sys.stdin:
        request = json.loads(line)
        match request["op"]:
            case "version":
                answer = version
            case "table":
                answer = flag_parser.table(parser, version)
            case "read":
                answer = [flag_parser.read(parser, case) for case in request["cases"]]
            case "judge":
                answer = [engine_config.judge(parser, case) for case in request["cases"]]
            case "meet":
                answer = [connector_checks.judge(case) for case in request["cases"]]
            case other:
                answer = f"unknown request {other}"
        answers.write(json.dumps(answer, default=str) + "\n")


if __name__ == "__main__":
    main()
