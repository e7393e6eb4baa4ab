"""Nearest values that work: found by search, so that a suggestion is right for every rule that `fits` stands for."""

from collections.abc import Callable, Iterable


def nearest(found: int, candidates: Iterable[int], fits: Callable[[int], bool]) -> list[int]:
    """Return the closest candidate below `found` and the closest above it that fit; fewer if there are none."""
    fitting = [candidate for candidate in candidates if candidate != found and fits(candidate)]
    below = [candidate for candidate in fitting if candidate < found]
    above = [candidate for candidate in fitting if candidate > found]
    return [*([max(below)] if below else []), *([min(above)] if above else [])]


def words(values: list[int]) -> str:
    """Return the end of a message that names them: `; nearest that work: 2, 4`, or nothing if there are none."""
    if not values:
        return ""
    return f"; nearest that {'works' if len(values) == 1 else 'work'}: {', '.join(map(str, values))}"
