"""Profiles of hypothesis: `dev` for everyday runs, `ci` for the many examples that a submission is judged by.

HYPOTHESIS_PROFILE names one; without it the variable CI decides, as it does for everything that runs unattended.
"""

import os

from hypothesis import settings

NAMES = ("dev", "ci")


def register() -> None:
    """Register the profiles and load the one that is asked for."""
    # Judged by the result and not by the clock: the machine may be doing other things.
    settings.register_profile("dev", deadline=None)
    # The same examples each time, so that a submission isn't refused for what another one has broken.
    settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
    settings.load_profile(current())


def current() -> str:
    """Return the name of the profile that is asked for."""
    named = os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
    if named not in NAMES:
        raise ValueError(f"HYPOTHESIS_PROFILE is {named}; the profiles are {' and '.join(NAMES)}")
    return named


def examples(*, dev: int, ci: int) -> int:
    """Return how many examples a test takes under the present profile."""
    return ci if current() == "ci" else dev
