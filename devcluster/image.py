"""`make image`: build the operator image from this checkout and load it into the running local cluster."""

import sys

from devcluster.errors import DevClusterError
from devcluster.paths import this_cache
from devcluster.progress import Progress
from devcluster.release import load_operator_image


def main() -> int:
    """Build and load. Exit code 2 with one sentence where that fails."""
    log = Progress()
    try:
        image = load_operator_image(this_cache(), log)
    except DevClusterError as error:
        print(f"make image: {error}", file=sys.stderr)
        return 2
    log(f"{image} is in the local cluster")
    return 0


if __name__ == "__main__":
    sys.exit(main())
