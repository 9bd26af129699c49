"""Prompt tokenisation: short prompts inline, long ones in a worker process with a deadline.

A short prompt goes to the worker too if its chat template expands it a lot or renders slowly; from
then on, so do all conversations.

Very long prompts have a separate worker, so that they never block others.

A request with a grammar waits until the grammar has been checked, also in a process with a
deadline. That wait is bounded even if other clients send many slow grammars.

The workers' results are cached for a while, and identical prompts in progress share one: a prompt
is tokenised once, whatever its number of choices.
"""

import contextlib
import hashlib
import logging
import os
import queue
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeAlias

import msgspec

from orchestrator.text.grammar_check import GrammarChecker
from orchestrator.text.tokenizer import TargetTokenizer
from orchestrator.text.worker_process import WorkerProcess
from protocol.decoding.chat_template import OutOfBounds, limit_work
from protocol.errors import Busy, ServiceLost, UsageError
from protocol.messages import (
    EncodePrompt,
    Generate,
    PromptTokens,
    Rejected,
    Tokens,
)
from protocol.process.awake_clock import awake_time
from protocol.settings import TextWorkerSettings
from protocol.transport.codec import encode

_log = logging.getLogger(__name__)

INLINE_BYTES = 8192
"""Longest prompt that is tokenised inline; it takes some ten milliseconds at worst."""
_INLINE_S = 0.05
"""Time limit of a template for such a prompt; it usually takes a millisecond."""
_INLINE_CHARACTERS = 8 * INLINE_BYTES
_INLINE_MEMORY = 512 << 20
_VERY_LONG_BYTES = 16 * INLINE_BYTES
"""Prompts of at least this size go to a separate worker, which may need seconds for one."""
_MOST_KEPT_TOKENS = 1 << 21
_WAIT_S = 15.0
"""Longest time that a grammar waits for those of other requests to be checked."""

Ticket = tuple[bytes, int]
"""A client, and its number for the request."""


class _Job(NamedTuple):
    """A prompt or grammar that a request waits for."""

    digest: bytes
    prompt: EncodePrompt
    size: int
    """Size of the prompt's message, in bytes."""
    grammar: str = ""
    """Grammar to check; empty if there is none, or its result is cached."""
    tokens: Tokens | None = None
    """The prompt, if it was sent as tokens."""
    since: float = 0.0
    """Arrival time."""


class PromptLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Cost limits of a prompt; 0 means unlimited."""

    max_bytes: int
    """Size of the text of all its parts."""
    timeout_s: float
    memory_bytes: int


Result: TypeAlias = Tokens | UsageError | Busy | ServiceLost


class PromptEncoder:
    """Encodes prompts with an inline tokenizer and with workers that start on demand."""

    def __init__(
        self,
        tokenizer: TargetTokenizer,
        folder: str,
        limits: PromptLimits,
        *,
        parse_special: bool = False,
    ) -> None:
        """Prepare the tokenizer; `parse_special` as in `TargetTokenizer`."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._template_is_slow = False
        self._kept: OrderedDict[bytes, Tokens] = OrderedDict()
        self._tickets: dict[Ticket, tuple[bytes, Generate]] = {}
        self._grammars = GrammarChecker(folder)
        self._results: deque[tuple[bytes, Result]] = deque()
        self.descriptor, self._waker = os.pipe()
        """Readable while results are ready."""
        os.set_blocking(self.descriptor, False)
        for end in (self.descriptor, self._waker):
            weakref.finalize(self, os.close, end)
        settings = TextWorkerSettings(
            lifeline=0,
            model=folder,
            max_bytes=limits.memory_bytes,
            parse_special=parse_special,
        )
        self._workers = [WorkerProcess(settings, "tokenises prompts") for _ in range(2)]
        self._prompts, self._very_long = (
            _Lane("prompts", partial(self._tokenise, worker)) for worker in self._workers
        )
        self._checks = _Lane("grammars", self._check)

    def prepare(self) -> None:
        """Start the process that checks grammars, in a thread: loading its tokenizer takes time."""
        threading.Thread(target=self._grammars.prepare, name="grammars", daemon=True).start()

    def encode(self, ticket: Ticket, message: Generate) -> Tokens | None:
        """Return the prompt's tokens, or None if `collect` will return them.

        Raises:
            UsageError: it is too long, the chat template rejects it, or its grammar has failed
                before.
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
            more = msgspec.msgpack.encode((grammar, message.tokens))
            digest = hashlib.blake2b(digest + more, digest_size=16).digest()
            job = _Job(digest, prompt, len(data), grammar, message.tokens, awake_time())
            self._submit(ticket, message, job)
            return None
        if (kept := self._kept.get(digest)) is not None:
            self._kept.move_to_end(digest)
            return list(kept)
        if len(data) <= INLINE_BYTES and not message.template_options:
            tokens = self._encode_here(prompt)
            if tokens is not None:
                return tokens
        self._submit(ticket, message, _Job(digest, prompt, len(data)))
        return None

    def _encode_here(self, prompt: EncodePrompt) -> Tokens | None:
        """Tokenise a short prompt inline; return None if its template needs the worker."""
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
        """Return the request's grammar unless it has been checked before.

        Raises UsageError if that check failed.
        """
        options = message.sampling.logits_options
        if options is None or not options.grammar:
            return ""
        error = self._grammars.recall(options.grammar)
        if error:
            raise UsageError(error)
        return options.grammar if error is None else ""

    def _submit(self, ticket: Ticket, message: Generate, job: "_Job") -> None:
        is_new = all(job.digest != other for other, _ in self._tickets.values())
        self._tickets[ticket] = job.digest, message
        if is_new and job.grammar:
            self._checks.put(job)
        elif is_new:
            self._put_prompt(job)

    def _put_prompt(self, job: "_Job") -> None:
        lane = self._very_long if job.size >= _VERY_LONG_BYTES else self._prompts
        lane.put(job)

    def __len__(self) -> int:
        """Return the number of requests that wait for their prompt."""
        return len(self._tickets)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._tickets

    def __iter__(self) -> Iterator[tuple[Ticket, Generate]]:
        return iter([(ticket, message) for ticket, (_, message) in self._tickets.items()])

    def cancel(self, ticket: Ticket) -> bool:
        """Forget a waiting request; return False if it does not wait."""
        return self._tickets.pop(ticket, None) is not None

    def collect(self) -> list[tuple[Ticket, Generate, Result]]:
        """Return the requests whose prompts are ready or have failed."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, 4096)
        done = []
        while self._results:
            digest, result = self._results.popleft()
            if isinstance(result, list):
                self._keep(digest, result)
            for ticket, (waiting_for, message) in list(self._tickets.items()):
                if waiting_for == digest:
                    del self._tickets[ticket]
                    copied = list(result) if isinstance(result, list) else result
                    done.append((ticket, message, copied))
        return done

    def close(self) -> None:
        """Terminate the workers that have started."""
        for worker in self._workers:
            worker.close()
        self._grammars.close()

    def _keep(self, digest: bytes, tokens: Tokens) -> None:
        self._kept[digest] = tokens
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _MOST_KEPT_TOKENS:
            self._kept.popitem(last=False)

    def _check(self, job: _Job) -> None:
        """Check the grammar in a separate thread, then pass the prompt on."""
        if awake_time() - job.since > _WAIT_S:
            self._answer(job, Busy("too many grammars are being checked; try again later"))
            return
        try:
            self._grammars.check(job.grammar)
        except (UsageError, ServiceLost) as error:
            self._answer(job, error)
        # The request must get its error and the thread must go on, whatever was raised.
        except Exception as error:  # noqa: BLE001
            _log.exception("a grammar could not be checked")
            self._answer(job, UsageError(f"the grammar cannot be checked: {error}"))
        else:
            if job.tokens:
                self._answer(job, job.tokens)
            else:
                self._put_prompt(job)

    def _tokenise(self, worker: WorkerProcess, job: _Job) -> None:
        """Wait for the worker in a separate thread."""
        result: Result
        try:
            result = self._ask(worker, job.prompt)
        except ServiceLost as error:
            result = error
        # See above: every error is reported to the request.
        except Exception as error:  # noqa: BLE001
            _log.exception("a prompt could not be tokenised")
            result = UsageError(f"the prompt cannot be tokenised: {error}")
        self._answer(job, result)

    def _ask(self, worker: WorkerProcess, prompt: EncodePrompt) -> Result:
        timeout_s = self._limits.timeout_s
        match worker.ask(prompt, timeout_s):
            case PromptTokens(tokens=tokens):
                return tokens
            case Rejected(reason=reason):
                return UsageError(reason)
            case "late":
                limit = f"{timeout_s:g} s (prompt_timeout_s)"
                return UsageError(f"the prompt could not be tokenised within {limit}")
            case _:
                return UsageError("the process that tokenises prompts broke down of this one")

    def _answer(self, job: _Job, result: Result) -> None:
        self._results.append((job.digest, result))
        os.write(self._waker, b"x")


class _Lane:
    """A thread that runs jobs one after the other; it starts with the first one."""

    def __init__(self, name: str, work: Callable[[_Job], None]) -> None:
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def put(self, job: _Job) -> None:
        """Queue a job."""
        self._jobs.put(job)
        with _starting:
            if not self._thread.is_alive():
                self._thread.start()

    def _run(self) -> None:
        while True:
            self._work(self._jobs.get())


_starting = threading.Lock()
"""Held to start a lane, since the event loop and other lanes may both put its first job."""


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
