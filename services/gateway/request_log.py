"""One log line per answer request: its route, its figures, and how it ended.

The figures are also counted in the metrics. Prompts and answers are never logged.
"""

import logging
import time

from protocol.messages import Finished
from protocol.process.logs import about
from services.gateway.errors import ApiError
from services.gateway.metrics import Metrics
from services.gateway.task import Choice

_log = logging.getLogger(__name__)

_LONGEST_REASON = 200
"""Characters of an error that are logged."""


class RequestLog:
    """Records the outcome of one HTTP request.

    Args:
        metrics: totals over all requests.
        route: its method and path.
    """

    def __init__(self, metrics: Metrics, route: str) -> None:
        self.name = ""
        """The answer's id as sent to its client; empty before there is one."""
        self._metrics = metrics
        self._route = route
        self._started = time.monotonic()
        self._is_over = False

    def on_answer(self, choice: Choice, finished: Finished) -> None:
        """Record that one of its answers has ended."""
        self._is_over = True
        tokens = choice.transcript.tokens
        self._metrics.count_answer(finished, tokens, choice.request.mode)
        words = describe_answer(finished, tokens)
        self._write(logging.INFO, words, choice.request.request)

    def on_refusal(self, error: ApiError) -> None:
        """Record that the request was refused."""
        if not self._is_over:
            self._is_over = True
            words = error.message[:_LONGEST_REASON]
            self._write(logging.WARNING, f"error {error.status}: {words}")

    def on_failure(self, error: ApiError) -> None:
        """Record that the request failed."""
        self._metrics.count_failure("error")
        self.on_refusal(error)

    def on_departure(self) -> None:
        """Record that the client disconnected, unless it had its answer."""
        if not self._is_over:
            self._metrics.count_failure("cancelled")
            self._write(logging.INFO, "cancelled by the client")

    def _write(self, level: int, words: str, request: int = 0) -> None:
        seconds = time.monotonic() - self._started
        ids: dict[str, int | str] = {"route": self._route}
        if self.name:
            ids["id"] = self.name
        if request:
            ids["request"] = request
        _log.log(level, "%s, %.1f s", words, seconds, extra=about(**ids))


def describe_answer(finished: Finished, tokens: int) -> str:
    """Return a short summary of the answer's figures."""
    s = finished.statistics
    prompt = f"{finished.prompt_tokens} prompt tokens"
    if finished.cached_tokens:
        prompt += f" ({finished.cached_tokens} cached)"
    speed = f" at {s.tok_s:.1f} tok/s" if s.tok_s else ""  # a few tokens arrive at once
    parts = [prompt, f"{tokens} tokens{speed}"]
    if s.drafted:
        parts.append(f"{s.accepted} of {s.drafted} draft tokens accepted")
    if s.drafter_restarts or s.verifier_restarts:
        parts.append(f"restarts: drafter {s.drafter_restarts}, verifier {s.verifier_restarts}")
    return ", ".join([*parts, f"ended by {finished.reason}"])
