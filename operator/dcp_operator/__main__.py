"""`python -m dcp_operator`: the processes of the operator image, and the command line beside them.

    python -m dcp_operator controller     reconciles objects
    python -m dcp_operator webhook        answers admission reviews
    python -m dcp_operator validate ...   everything else is dcpctl

Each is imported only when it runs: the webhook needs none of the controller's code, and dcpctl neither.
"""

import sys


def main() -> int:
    """Run the process or command that the first argument names and return its exit code."""
    process = sys.argv[1] if len(sys.argv) > 1 else ""
    if process == "controller":
        from dcp_operator.controller import main as controller

        return controller()
    if process == "webhook":
        from dcp_operator.webhook import main as webhook

        return webhook()
    from dcp_operator.cli import main as dcpctl

    return dcpctl()


if __name__ == "__main__":
    sys.exit(main())
