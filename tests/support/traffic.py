"""Clients that ask one endpoint again and again, and remember every answer."""

import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from devcluster.completions import CompletionError, complete

MAX_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when it was sent and ended (monotonic seconds), and what came of it."""

    began: float
    ended: float
    prompt: str
    token_ids: tuple[int, ...] | None
    failure: str = ""


@dataclass
class Traffic:
    """Requests to `url`, `at_once` at a time; `expected` gives the prompts and the tokens that are right."""

    url: str
    model: str
    expected: Mapping[str, tuple[int, ...]]
    at_once: int = 2
    timeout_s: float = 120.0
    asked: list[Asked] = field(default_factory=list[Asked])

    @contextmanager
    def running(self) -> Iterator["Traffic"]:
        """Ask until the block ends; requests that are then in flight are waited for."""
        done, prompts = threading.Event(), itertools.cycle(self.expected)
        lock = threading.Lock()

        def ask() -> None:
            while not done.is_set():
                with lock:
                    prompt = next(prompts)
                result = self._ask(prompt)
                with lock:
                    self.asked.append(result)
                # A client that was refused at once would do nothing but ask.
                done.wait(0.2 if result.failure else 0.02)

        threads = [threading.Thread(target=ask) for _ in range(self.at_once)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            done.set()
            for thread in threads:
                thread.join()

    def failures(self) -> list[Asked]:
        """Return the requests that got no answer."""
        return [each for each in self.asked if each.token_ids is None]

    def wrong(self) -> list[Asked]:
        """Return the answers that differ from what is expected."""
        return [each for each in self.asked if each.token_ids not in (None, self.expected[each.prompt])]

    def wait_for_answers(self, number: int, within_s: float) -> None:
        """Return when so many more answers have come than now; fails after `within_s`."""
        answered = sum(each.token_ids is not None for each in list(self.asked))
        deadline = time.monotonic() + within_s
        while sum(each.token_ids is not None for each in list(self.asked)) < answered + number:
            assert time.monotonic() < deadline, f"fewer than {number} answers in {within_s:.0f} s; {self.said()}"
            time.sleep(0.1)

    def said(self) -> str:
        """Return the counts, and the words of the first failures."""
        failures = self.failures()
        words = "; ".join(f"{each.failure} after {each.ended - each.began:.1f} s" for each in failures[:5])
        return f"{len(self.asked)} requests, {len(failures)} failed, {len(self.wrong())} wrong {words}".strip()

    def _ask(self, prompt: str) -> Asked:
        began = time.monotonic()
        try:
            answer = complete(self.url, prompt, model=self.model, max_tokens=MAX_TOKENS, timeout_s=self.timeout_s)
        except CompletionError as error:
            return Asked(began, time.monotonic(), prompt, None, str(error))
        return Asked(began, time.monotonic(), prompt, answer.token_ids)
