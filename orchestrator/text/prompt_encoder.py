"""Tokenises prompts: short ones at once, long ones in a worker process with a deadline.

A request with a grammar waits until that has been checked, in a process with a deadline too.

A prompt is tokenised once, however many choices are asked for: results are kept for a
while, and whoever asks for a prompt that is in work waits for the same result.
"""

import contextlib
import hashlib
import logging
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict, deque
from typing import NamedTuple

import msgspec

from orchestrator.text.tokenizer import TargetTokenizer
from protocol.decoding.grammar_check import GrammarChecker
from protocol.errors import DeadlineExceeded, SsdError, UsageError
from protocol.messages import (
    EncodePrompt,
    FromPromptWorker,
    Generate,
    PromptTokens,
    Rejected,
    Tokens,
)
from protocol.settings import PromptWorkerSettings, encode_settings
from protocol.transport.codec import Decoder, encode
from protocol.transport.pipes import PipeChannel

_log = logging.getLogger(__name__)

INLINE_BYTES = 8192
"""Longest prompt that is tokenised at once: at worst some ten milliseconds."""
_KEPT_BYTES = 512
"""Shortest prompt whose tokens are worth keeping."""
_MOST_KEPT_TOKENS = 1 << 21
_START_S = 60.0
"""Longest wait for the worker to load the tokenizer."""

Ticket = tuple[bytes, int]
"""A client, and its number of the request."""


class PromptLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt may cost; 0 is no limit."""

    max_bytes: int
    """Of the text of all its parts."""
    timeout_s: float
    memory_bytes: int


class _Job(NamedTuple):
    """What a request waits for."""

    digest: bytes
    prompt: EncodePrompt
    grammar: str = ""
    """To be checked; empty: there is none, or it is known."""
    tokens: Tokens | None = None
    """The prompt, if it came as tokens."""


class PromptEncoder:
    """One tokenizer in this process, and one in a worker that is started when it is needed."""

    def __init__(self, tokenizer: TargetTokenizer, folder: str, limits: PromptLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._kept: OrderedDict[bytes, Tokens] = OrderedDict()
        self._tickets: dict[Ticket, tuple[bytes, Generate]] = {}
        self._grammars = GrammarChecker(folder)
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._results: deque[tuple[bytes, Tokens | UsageError]] = deque()
        self.descriptor, self._waker = os.pipe()
        """Readable while results wait."""
        os.set_blocking(self.descriptor, False)
        for end in (self.descriptor, self._waker):
            weakref.finalize(self, os.close, end)
        self._worker = _Worker(folder, limits)
        self._thread = threading.Thread(target=self._work, name="prompts", daemon=True)

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
            self._submit(ticket, message, _Job(digest, prompt, grammar, message.tokens))
            return None
        if (known := self._kept.get(digest)) is not None:
            self._kept.move_to_end(digest)
            return list(known)
        if len(data) <= INLINE_BYTES and not message.template_options:
            tokens = self._tokenizer.encode_prompt(prompt)
            if len(data) >= _KEPT_BYTES:
                self._keep(digest, tokens)
            return tokens
        self._submit(ticket, message, _Job(digest, prompt))
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
        if is_new:
            self._jobs.put(job)
        if not self._thread.is_alive():
            self._thread.start()

    def __len__(self) -> int:
        """How many requests wait for their prompt."""
        return len(self._tickets)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._tickets

    def cancel(self, ticket: Ticket) -> bool:
        """Forget a request that waits; False if it does not."""
        return self._tickets.pop(ticket, None) is not None

    def collect(self) -> list[tuple[Ticket, Generate, Tokens | UsageError]]:
        """The requests whose prompts are done, or cannot be made."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, 4096)
        done = []
        while self._results:
            digest, result = self._results.popleft()
            if not isinstance(result, UsageError):
                self._keep(digest, result)
            for ticket, (wanted, message) in list(self._tickets.items()):
                if wanted == digest:
                    del self._tickets[ticket]
                    own = result if isinstance(result, UsageError) else list(result)
                    done.append((ticket, message, own))
        return done

    def close(self) -> None:
        """End the workers, if there are any."""
        self._worker.kill()
        self._grammars.close()

    def _keep(self, digest: bytes, tokens: Tokens) -> None:
        self._kept[digest] = tokens
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _MOST_KEPT_TOKENS:
            self._kept.popitem(last=False)

    def _work(self) -> None:
        """The thread that waits for the workers."""
        while True:
            job = self._jobs.get()
            result: Tokens | UsageError
            try:
                if job.grammar:
                    self._grammars.check(job.grammar)
                result = job.tokens or self._worker.encode(job.prompt)
            except UsageError as error:
                result = error
            # Whatever it is: the request must hear of it, and the thread must go on.
            except Exception as error:  # noqa: BLE001
                _log.exception("a prompt could not be tokenised")
                result = UsageError(f"the prompt cannot be tokenised: {error}")
            self._results.append((job.digest, result))
            os.write(self._waker, b"x")


class _Worker:
    """The worker process, started again whenever it had to be killed."""

    def __init__(self, folder: str, limits: PromptLimits) -> None:
        self._folder = folder
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: PipeChannel[FromPromptWorker] | None = None
        self._ends: list[int] = []
        """Our ends of its pipes."""

    def encode(self, prompt: EncodePrompt) -> Tokens | UsageError:
        """The tokens, or why there are none."""
        try:
            channel = self._channel or self._start()
            channel.send(prompt)
            timeout_s = self._limits.timeout_s or threading.TIMEOUT_MAX
            answer = channel.receive(timeout_s, "tokens of the prompt")
        except DeadlineExceeded:
            self.kill()
            return UsageError(
                f"the prompt could not be tokenised within {self._limits.timeout_s:g} s "
                "(prompt_timeout_s)"
            )
        except (SsdError, OSError) as error:
            self.kill()
            _log.warning("the prompt worker was lost: %s", error)
            return UsageError("the prompt cannot be tokenised: the process that tried it ended")
        if isinstance(answer, PromptTokens):
            return answer.tokens
        reason = answer.reason if isinstance(answer, Rejected) else "the worker restarted"
        return UsageError(reason)

    def _start(self) -> PipeChannel[FromPromptWorker]:
        (lifeline, kept), (reading, answers), (prompts, writing) = os.pipe(), os.pipe(), os.pipe()
        self._ends = [kept, reading, writing]
        settings = PromptWorkerSettings(
            lifeline=lifeline, model=self._folder, max_bytes=self._limits.memory_bytes
        )
        command = [sys.executable, "-m", "orchestrator.text.prompt_worker"]
        try:
            self._process = subprocess.Popen(
                [*command, encode_settings(settings)],
                stdin=prompts,
                stdout=answers,
                pass_fds=(lifeline,),
                start_new_session=True,
            )
        finally:
            for end in (lifeline, answers, prompts):
                os.close(end)
        channel = PipeChannel[FromPromptWorker](reading, writing, Decoder(FromPromptWorker))
        channel.receive(_START_S, "sign that the prompt worker is ready")
        self._channel = channel
        return channel

    def kill(self) -> None:
        """End it; the next prompt gets a new one."""
        self._channel = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        for end in self._ends:
            os.close(end)
        self._ends = []


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
