"""The long form: `python -m tests.fuzz`, a part of `make nightly`. Each run has another seed, which it prints.

`--inputs` is how many the decoder of frames gets, a million by default. The other targets get shares of it: the state
machines, parameters and topologies a quarter (250,000), the HTTP servers 0.15 (150,000), because each of those is a
connection. A million takes about ten minutes.
"""

from __future__ import annotations

import argparse
import random
import sys

from tests.fuzz.run import FoundError, run
from tests.fuzz.targets import TARGETS

_SHARES = {"frames": 1.0, "states": 0.25, "params": 0.25, "topology": 0.25, "http": 0.15}
assert _SHARES.keys() == TARGETS.keys()


def main(arguments: list[str]) -> int:
    """Fuzz all targets, or some; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="inputs of `frames` (default 1,000,000)")
    parser.add_argument("--seed", type=int, default=None, help="repeat the run with this seed")
    parser.add_argument("targets", nargs="*", help=f"some of {', '.join(TARGETS)}; all without any")
    options = parser.parse_args(arguments)
    names = options.targets or list(TARGETS)
    unknown = sorted(set(names) - set(TARGETS))
    if unknown:
        parser.error(f"no such target: {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    seed = random.randrange(2**31) if options.seed is None else options.seed
    for name in names:
        try:
            print(run(name, seed, num_inputs=max(1, round(options.inputs * _SHARES[name]))), flush=True)
        except FoundError as found:
            print(f"{found}; repeat it with: python -m tests.fuzz --seed {seed} --inputs {options.inputs} {name}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
