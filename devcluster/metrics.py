"""Reads counters from a Prometheus text page."""

import re
import urllib.request

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


def total(page: str, metric: str, **labels: str) -> float:
    """Return the sum of a metric's samples that carry these labels; 0 where there is none."""
    value = 0.0
    for line in page.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None or sample["name"] != metric:
            continue
        found = dict(_LABEL.findall(sample["labels"] or ""))
        if labels.items() <= found.items():
            value += float(sample["value"])
    return value


def scrape(url: str, *, timeout_s: float = 10.0) -> str:
    """Return a metrics page as text. Raises OSError where nobody answers."""
    with urllib.request.urlopen(url, timeout=timeout_s) as response:  # noqa: S310 - a pod's address
        return response.read().decode()
