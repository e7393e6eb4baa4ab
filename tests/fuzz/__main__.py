"""The nightly form: `python -m tests.fuzz --inputs 1000000`. Each run has another seed, which it prints.

The bootstrap server gets a twentieth of the inputs, because each is a connection.
"""

from __future__ import annotations

import argparse
import random
import sys

from tests.fuzz.run import FoundError, run
from tests.fuzz.targets import TARGETS

_SHARES = {"bootstrap": 0.05}


def main(arguments: list[str]) -> int:
    """Fuzz all targets, or some; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="inputs over all targets (default 1,000,000)")
    parser.add_argument("--seed", type=int, default=None, help="repeat the run with this seed")
    parser.add_argument("targets", nargs="*", help=f"some of {', '.join(TARGETS)}; all without any")
    options = parser.parse_args(arguments)
    names = options.targets or list(TARGETS)
    unknown = sorted(set(names) - set(TARGETS))
    if unknown:
        parser.error(f"no such target: {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    seed = random.randrange(2**31) if options.seed is None else options.seed
    weight = sum(_SHARES.get(name, 1.0) for name in names)
    for name in names:
        try:
            print(run(name, seed, num_inputs=int(options.inputs * _SHARES.get(name, 1.0) / weight) + 1), flush=True)
        except FoundError as found:
            print(f"{found}; repeat it with: python -m tests.fuzz --seed {seed} --inputs {options.inputs} {name}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
