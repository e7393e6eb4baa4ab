"""`make image`: build the operator image from this checkout and load it into the running local cluster."""

import sys

from devcluster.commands import guarded
from devcluster.paths import Cache, this_cache
from devcluster.progress import Progress
from devcluster.release import load_operator_image


def _image(cache: Cache) -> int:
    log = Progress()
    log(f"{load_operator_image(cache, log)} is in the local cluster")
    return 0


if __name__ == "__main__":
    cache = this_cache()
    sys.exit(guarded("make image", cache, lambda: _image(cache)))
