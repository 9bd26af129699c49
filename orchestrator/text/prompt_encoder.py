"""Tokenises prompts: short ones at once, long ones in a worker process with a deadline.

A short prompt that a chat template makes much of, or takes long for, goes to the worker too, and
so do all conversations that follow it.

Very long prompts have a worker of their own, so that others wait for none of them, and for both
workers short prompts go before longer ones that came a little earlier.

A request with a grammar waits until that has been checked, in a process with a deadline too,
but not for ever, if others send many that take long.

A prompt is tokenised once, however many choices are asked for: results are kept for a
while, and whoever asks for a prompt that is in work waits for the same result.
"""

import contextlib
import hashlib
import itertools
import logging
import os
import queue
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeAlias

from orchestrator.text.prompt_process import PromptLimits, PromptProcess
from orchestrator.text.tokenizer import TargetTokenizer
from protocol.decoding.chat_template import OutOfBounds, limit_work
from protocol.decoding.grammar_check import GrammarChecker
from protocol.errors import Busy, ServiceLost, UsageError
from protocol.messages import (
    EncodePrompt,
    Generate,
    Tokens,
)
from protocol.transport.codec import encode

_log = logging.getLogger(__name__)

INLINE_BYTES = 8192
"""Longest prompt that is tokenised at once: at worst some ten milliseconds."""
_INLINE_S = 0.05
"""What a template may take for such a prompt; usually it is a millisecond."""
_INLINE_CHARACTERS = 8 * INLINE_BYTES
_INLINE_MEMORY = 512 << 20
_VERY_LONG_BYTES = 16 * INLINE_BYTES
"""From here on, prompts have a worker of their own: some take it seconds."""
_YIELD_S = 1e-5
"""For how long a prompt lets shorter ones go first, per byte: a few times what it takes."""
_KEPT_BYTES = 512
"""Shortest prompt whose tokens are worth keeping."""
_MOST_KEPT_TOKENS = 1 << 21
_WAIT_S = 15.0
"""Longest wait of a grammar for those of others."""

Ticket = tuple[bytes, int]
"""A client, and its number of the request."""


class _Job(NamedTuple):
    """What a request waits for."""

    digest: bytes
    prompt: EncodePrompt
    size: int
    """Of the prompt's message, in bytes."""
    grammar: str = ""
    """To be checked; empty: there is none, or it is known."""
    tokens: Tokens | None = None
    """The prompt, if it came as tokens."""
    since: float = 0.0
    """When it was asked for."""


Result: TypeAlias = Tokens | UsageError | Busy | ServiceLost


class PromptEncoder:
    """One tokenizer in this process, and one in each worker, which start when they are needed."""

    def __init__(
        self,
        tokenizer: TargetTokenizer,
        folder: str,
        limits: PromptLimits,
        *,
        parse_special: bool = False,
    ) -> None:
        """`parse_special`: as for the tokenizer."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._template_is_slow = False
        self._kept: OrderedDict[bytes, Tokens] = OrderedDict()
        self._tickets: dict[Ticket, tuple[bytes, Generate]] = {}
        self._grammars = GrammarChecker(folder)
        self._results: deque[tuple[bytes, Result]] = deque()
        self.descriptor, self._waker = os.pipe()
        """Readable while results wait."""
        os.set_blocking(self.descriptor, False)
        for end in (self.descriptor, self._waker):
            weakref.finalize(self, os.close, end)
        self._workers = [
            PromptProcess(folder, limits, parse_special=parse_special) for _ in range(2)
        ]
        self._prompts, self._very_long = (
            _Lane("prompts", partial(self._tokenise, worker)) for worker in self._workers
        )
        self._checks = _Lane("grammars", self._check)

    def encode(self, ticket: Ticket, message: Generate) -> Tokens | None:
        """The prompt's tokens, or None if `collect` will return them.

        Raises:
            UsageError: it is too long, the chat template refuses it, or its grammar is known
                to be unusable.
        """
        grammar = self._find_unchecked_grammar(message)
        if message.tokens and not grammar:
            return message.tokens
        prompt = _prompt_of(message)
        data = encode(prompt)
        limit = self._limits.max_bytes
        if 0 < limit < len(data):
            raise UsageError(
                f"the prompt has {len(data):,} bytes, more than this stack takes: {limit:,} "
                "(max_prompt_bytes)"
            )
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if grammar or message.tokens:
            digest = hashlib.blake2b(repr((data, grammar, message.tokens)).encode()).digest()
            job = _Job(digest, prompt, len(data), grammar, message.tokens, time.monotonic())
            self._submit(ticket, message, job)
            return None
        if (known := self._kept.get(digest)) is not None:
            self._kept.move_to_end(digest)
            return list(known)
        if len(data) <= INLINE_BYTES and not message.template_options:
            tokens = self._encode_here(prompt)
            if tokens is not None:
                if len(data) >= _KEPT_BYTES:
                    self._keep(digest, tokens)
                return tokens
        self._submit(ticket, message, _Job(digest, prompt, len(data)))
        return None

    def _encode_here(self, prompt: EncodePrompt) -> Tokens | None:
        """The tokens of a short prompt, or None if its template takes too much for this process."""
        if prompt.text:
            return self._tokenizer.encode_prompt(prompt)
        if self._template_is_slow:
            return None
        try:
            with limit_work(_INLINE_S, _INLINE_MEMORY):
                return self._tokenizer.encode_prompt(prompt, most_characters=_INLINE_CHARACTERS)
        except (OutOfBounds, MemoryError):
            self._template_is_slow = True
            _log.warning("the chat template takes long: prompts are rendered by a worker now")
            return None

    def _find_unchecked_grammar(self, message: Generate) -> str:
        """The request's grammar, unless it is known to be usable; raises UsageError if not."""
        options = message.sampling.logits_options
        if options is None or not options.grammar:
            return ""
        known = self._grammars.recall(options.grammar)
        if known:
            raise UsageError(known)
        return options.grammar if known is None else ""

    def _submit(self, ticket: Ticket, message: Generate, job: "_Job") -> None:
        is_new = all(job.digest != other for other, _ in self._tickets.values())
        self._tickets[ticket] = job.digest, message
        if is_new and job.grammar:
            self._checks.put(job)
        elif is_new:
            self._put_prompt(job)

    def _put_prompt(self, job: "_Job") -> None:
        lane = self._very_long if job.size >= _VERY_LONG_BYTES else self._prompts
        lane.put(job, job.size * _YIELD_S)

    def __len__(self) -> int:
        """How many requests wait for their prompt."""
        return len(self._tickets)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._tickets

    def __iter__(self) -> Iterator[tuple[Ticket, Generate]]:
        return iter([(ticket, message) for ticket, (_, message) in self._tickets.items()])

    def cancel(self, ticket: Ticket) -> bool:
        """Forget a request that waits; False if it does not."""
        return self._tickets.pop(ticket, None) is not None

    def collect(self) -> list[tuple[Ticket, Generate, Result]]:
        """The requests whose prompts are done, or cannot be made."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, 4096)
        done = []
        while self._results:
            digest, result = self._results.popleft()
            if isinstance(result, list):
                self._keep(digest, result)
            for ticket, (wanted, message) in list(self._tickets.items()):
                if wanted == digest:
                    del self._tickets[ticket]
                    own = list(result) if isinstance(result, list) else result
                    done.append((ticket, message, own))
        return done

    def close(self) -> None:
        """End the workers, if there are any."""
        for worker in self._workers:
            worker.close()
        self._grammars.close()

    def _keep(self, digest: bytes, tokens: Tokens) -> None:
        self._kept[digest] = tokens
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _MOST_KEPT_TOKENS:
            self._kept.popitem(last=False)

    def _check(self, job: _Job) -> None:
        """In a thread of its own: check the grammar, then pass the prompt on."""
        if time.monotonic() - job.since > _WAIT_S:
            self._answer(job, Busy("too many grammars are being checked; try again later"))
            return
        try:
            self._grammars.check(job.grammar)
        except (UsageError, ServiceLost) as error:
            self._answer(job, error)
        # Whatever it is: the request must hear of it, and the thread must go on.
        except Exception as error:  # noqa: BLE001
            _log.exception("a grammar could not be checked")
            self._answer(job, UsageError(f"the grammar cannot be checked: {error}"))
        else:
            if job.tokens:
                self._answer(job, job.tokens)
            else:
                self._put_prompt(job)

    def _tokenise(self, worker: PromptProcess, job: _Job) -> None:
        """In a thread of its own: wait for the worker."""
        result: Result
        try:
            result = worker.encode(job.prompt)
        # As above.
        except Exception as error:  # noqa: BLE001
            _log.exception("a prompt could not be tokenised")
            result = UsageError(f"the prompt cannot be tokenised: {error}")
        self._answer(job, result)

    def _answer(self, job: _Job, result: Result) -> None:
        self._results.append((job.digest, result))
        os.write(self._waker, b"x")


class _Lane:
    """A thread that does jobs one after the other, from the first one on."""

    def __init__(self, name: str, work: Callable[[_Job], None]) -> None:
        self._jobs: queue.PriorityQueue[tuple[float, int, _Job]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def put(self, job: _Job, yields_s: float = 0.0) -> None:
        """Have this done, too, after what comes in the next `yields_s` and yields for less."""
        self._jobs.put((time.monotonic() + yields_s, next(self._numbers), job))
        with _starting:
            if not self._thread.is_alive():
                self._thread.start()

    def _run(self) -> None:
        while True:
            self._work(self._jobs.get()[-1])


_starting = threading.Lock()
"""Lanes are put into by the loop, and by each other."""


def _prompt_of(message: Generate) -> EncodePrompt:
    if message.text:
        return EncodePrompt(text=message.text)
    return EncodePrompt(
        messages=message.messages,
        tools=message.tools,
        template_options=message.template_options,
        answer_tokens=message.answer_tokens,
        answer_start=message.answer_start,
    )
