"""A request for an answer from any API, and the orchestrator's requests for it."""

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import msgspec
from msgspec.structs import replace

from protocol.decoding.model_sampling import merge_options
from protocol.decoding.sampling_params import check_sampling, fit_filters
from protocol.errors import RuntimeFailure
from protocol.messages import (
    ChatMessage,
    Finished,
    Generate,
    LogitsOptions,
    Progress,
    Sampling,
    Tokens,
)
from services.gateway.body import check_free_form, to_field_error
from services.gateway.errors import invalid, refuse_value
from services.gateway.reasoning import ThoughtLimit
from services.gateway.template import ModelText
from services.gateway.tools.calls import ToolFunction
from services.gateway.transcript import (
    AnswerFormat,
    AnswerGrammar,
    Beginning,
    Transcript,
    find_answer_format,
)
from services.gateway.turns import TurnFitter

UNLIMITED = 2**31 - 1
"""Tokens of an answer that may grow until the context is full."""
MAX_ANSWERS = 128
"""Most answers to one request, prompts times choices: OpenAI's limit."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)
_TEMPLATE_ARGUMENTS = {"messages", "tools", "add_generation_prompt"}


@dataclass(frozen=True, kw_only=True)
class PromptInput:
    """One of: a conversation, a text to be continued, its tokens."""

    messages: list[ChatMessage] = field(default_factory=list)
    answer_start: str = ""
    """Beginning of the answer, which the client already has."""
    answer_thought: str = ""
    """The thought before it."""
    text: str = ""
    suffix: str = ""
    """Text after the continuation."""
    tokens: Tokens = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Thinking:
    """The client's wishes for the model's thoughts; None leaves them to the model."""

    enabled: bool | None = None
    effort: Effort | None = None
    budget: int | None = None
    """Most tokens of a thought."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A client's request."""

    prompts: Sequence[PromptInput]
    model: str | None = None
    sampling: Sampling
    """Sampling without a grammar."""
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    choices: int = 1
    """Answers to each prompt."""
    functions: Sequence[ToolFunction] = ()
    must_call: bool = False
    one_call: bool = False
    schema: dict[str, Any] | None = None
    """Schema of the answer, if it must be JSON."""
    thinking: Thinking = Thinking()
    template_options: dict[str, Any] = field(default_factory=dict)
    plain: bool = False
    """True to decode without drafts."""
    drafter: str | None = None
    """The drafter that must be running."""
    num_draft_tokens: int = 0
    stream: bool = False
    client: str = ""
    """The client's name; capacity is shared among clients."""
    is_background: bool = False
    """True if other requests may go first."""
    is_large: bool = False
    """True if its prompts are too long to be sent once per choice."""
    unknown: list[str] = field(default_factory=list)
    """Fields that were dropped."""


@dataclass
class Choice:
    """One of the answers in progress."""

    index: int
    request: Generate
    transcript: Transcript
    thought_limit: ThoughtLimit | None = None
    finished: Finished | None = None
    progress: Progress | None = None
    """Progress of its prefill."""

    def on_progress(self, progress: Progress) -> None:
        """Record the progress of its prefill."""
        self.progress = progress

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt; 0 until they are counted."""
        if self.finished is not None:
            return self.finished.prompt_tokens
        return self.progress.prompt_tokens if self.progress else 0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens reused from the KV of earlier requests."""
        if self.finished is not None:
            return self.finished.cached_tokens
        return self.progress.cached if self.progress else 0

    @property
    def end(self) -> Finished:
        """Its last message; raises RuntimeFailure before that."""
        if self.finished is None:
            raise RuntimeFailure("the answer ended without its last message")
        return self.finished

    @property
    def is_limited(self) -> bool:
        """True if a limit ended it, rather than the model."""
        return self.end.reason in ("length", "context")

    @property
    def is_cut_off(self) -> bool:
        """True if a limit or a stop string ended it, perhaps within a call."""
        return self.is_limited or bool(self.end.stop_string)


class TaskPlanner:
    """Turns tasks into requests to the orchestrator, for one model."""

    def __init__(self, text: ModelText, *, max_draft_tokens: int = 0) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._numbers = itertools.count(1)
        self._text = text
        self._format = find_answer_format(text)
        self._turns = TurnFitter(text)

    def plan(self, task: Task) -> list[Choice]:
        """Return the requests of a task, prompt by prompt; each choice has its own seed.

        Raises:
            ApiError: it cannot be honoured.
        """
        is_chat = bool(task.prompts[0].messages)
        thinks = is_chat and self._thinks(task)
        options = self._template_options(task, thinks=thinks)
        opened = is_chat and self._opens_thought(options)
        grammar = self._write_grammar(task, opened if thinks else None)
        if grammar.text and any(p.answer_start or p.answer_thought for p in task.prompts):
            raise refuse_value(
                "messages",
                "an answer that must follow a schema or call a tool cannot be begun by the client:"
                " leave the assistant's last message out, or what the answer must be",
            )
        sampling = _add_grammar(task.sampling, grammar.text)
        check_sampling(sampling)
        beginnings = [self._begin(p, opened=opened, thinks=thinks) for p in task.prompts]
        asked = [
            self._request(task, prompt, sampling, options, beginning.text)
            for prompt, beginning in zip(task.prompts, beginnings, strict=True)
        ]
        if not is_chat:
            grammar = AnswerGrammar(AnswerFormat())
        return [
            self._choose(task, index, request, grammar, beginnings[index // task.choices])
            for index, request in enumerate(self._repeat(asked, task.choices))
        ]

    def _choose(
        self,
        task: Task,
        index: int,
        request: Generate,
        grammar: AnswerGrammar,
        beginning: Beginning,
    ) -> Choice:
        """Return one choice with the reader of its answer."""
        form = grammar.form
        reader = form.reader(
            task.functions,
            opened=beginning.in_thought,
            begun=beginning.in_answer,
            bare_calls=grammar.bare_calls,
        )
        limit = self._limit_thought(task, form, beginning, grammar.after_thought)
        return Choice(index, request, Transcript(reader, one_call=task.one_call), limit)

    def _write_grammar(self, task: Task, opened: bool | None) -> AnswerGrammar:  # noqa: FBT001
        """Return the grammar of the answer; `opened` and errors as for `GrammarWriter.write`."""
        if not (task.functions or task.must_call) and task.schema is None:
            return AnswerGrammar(self._format)
        from services.gateway.answer_grammar import GrammarWriter  # noqa: PLC0415

        return GrammarWriter(self._text, self._format).write(
            task.functions,
            task.schema,
            must_call=task.must_call,
            one_call=task.one_call,
            opened=opened,
        )

    def _thinks(self, task: Task) -> bool:
        """Return True if the answer may start with a thought.

        It may unless the client wants none; a forced call or JSON may only if the client wants
        thoughts.
        """
        thinking = task.thinking
        wanted = thinking.enabled
        if wanted is None and thinking.effort is not None:
            wanted = thinking.effort not in ("none", "minimal")
        if wanted is None and thinking.budget is not None:
            wanted = True
        if wanted is None:
            either = bool(task.functions) and task.schema is not None
            wanted = not task.must_call and (task.schema is None or either)
        return wanted and (self._format.harmony or self._format.thoughts is not None)

    def _repeat(self, requests: list[Generate], choices: int) -> list[Generate]:
        """Return the requests for all choices, each with its own number and seed."""
        group = 1 + secrets.randbits(62)
        return [
            replace(
                one,
                request=next(self._numbers),
                group=group,
                sampling=replace(one.sampling, seed=(one.sampling.seed + offset) % 2**63),
            )
            for one in requests
            for offset in range(choices)
        ]

    def _opens_thought(self, options: dict[str, Any]) -> bool:
        """Return True if prompts end within a thought."""
        thoughts = self._format.thoughts
        if thoughts is None:
            return False
        ending = self._text.prompt_end(options)
        return ending.rfind(thoughts.start) > ending.rfind(thoughts.end)

    def _begin(self, prompt: PromptInput, *, opened: bool, thinks: bool) -> Beginning:
        """Return the beginning of the answer to a prompt; a text is its own."""
        if not prompt.messages:
            return Beginning()
        thought = prompt.answer_thought if thinks else ""
        return self._format.begin(prompt.answer_start, thought, opened=opened, thinks=thinks)

    def _limit_thought(
        self, task: Task, form: AnswerFormat, beginning: Beginning, after: str
    ) -> ThoughtLimit | None:
        budget = task.thinking.budget
        # A grammar contains the following channel.
        end = form.write_thought_end(opens_answer=not after)
        if budget is None or not end:
            return None
        reader = form.reader((), opened=beginning.in_thought, begun=beginning.in_answer)
        return ThoughtLimit(reader, budget, end=end, after=after)

    def _request(
        self,
        task: Task,
        prompt: PromptInput,
        sampling: Sampling,
        options: dict[str, Any],
        answer_start: str,
    ) -> Generate:
        messages, tools = self._turns.fit(prompt.messages, task.functions)
        try:
            return Generate(
                request=next(self._numbers),
                messages=messages,
                text=self._write_text(prompt),
                tokens=prompt.tokens,
                tools=tools,
                template_options=options,
                answer_start=answer_start,
                special_text=self._format.special_marks or bool(task.functions),
                sampling=sampling,
                max_tokens=min(task.max_tokens or UNLIMITED, UNLIMITED),
                stop=task.stop,
                mode="ar" if task.plain else "ssd",
                num_draft_tokens=task.num_draft_tokens,
                max_draft_tokens=self._max_draft_tokens,
                client=task.client,
                is_background=task.is_background,
                progress=task.stream,
            )
        except msgspec.ValidationError as error:
            raise to_field_error(error) from error

    def _write_text(self, prompt: PromptInput) -> str:
        """Return the text that the model continues."""
        if not prompt.suffix:
            return prompt.text
        text = self._text.fill_in(prompt.text, prompt.suffix)
        if text is None:
            why = "this model has no tokens for filling in; leave it out to continue the prompt"
            raise refuse_value("suffix", why)
        return text

    def _template_options(self, task: Task, *, thinks: bool) -> dict[str, Any]:
        """Return the variables of the chat template, including those about thinking."""
        check_free_form(task.template_options, "chat_template_kwargs")
        if taken := _TEMPLATE_ARGUMENTS & task.template_options.keys():
            raise refuse_value("chat_template_kwargs", f"the server itself sets {min(taken)!r}")
        options = dict(task.template_options)
        thinking = task.thinking
        constrained = task.must_call or task.schema is not None
        enabled = False if constrained and not thinks else thinking.enabled
        if thinking.effort in ("none", "minimal") and enabled is None:
            enabled = False
        template = self._text.template
        if thinking.effort and "reasoning_effort" in template:
            # gpt-oss has three efforts.
            known = thinking.effort if thinking.effort in ("low", "medium") else "high"
            low = thinking.effort in ("none", "minimal")
            options.setdefault("reasoning_effort", "low" if low else known)
        if enabled is not None:
            name = "enable_thinking" if "enable_thinking" in template else "thinking"
            options.setdefault(name, enabled)
        return options


def _add_grammar(sampling: Sampling, grammar: str) -> Sampling:
    if not grammar:
        return sampling
    return replace(
        sampling,
        logits_options=replace(sampling.logits_options or LogitsOptions(), grammar=grammar),
    )


def make_sampling(
    defaults: Sampling,
    *,
    seed: int | None,
    bias: dict[str, float] | None = None,
    penalties: dict[str, float | None] | None = None,
    **given: Any,
) -> Sampling:
    """Return the defaults overridden by a request's values; None means not given."""
    if bias and not all(token.isdecimal() and int(token) < 2**31 for token in bias):
        raise invalid("logit_bias", "keys are token ids")
    asked: dict[str, Any] = {
        n: value for n, value in (penalties or {}).items() if value is not None
    }
    if bias:
        asked["logit_bias"] = tuple(sorted((int(t), value) for t, value in bias.items() if value))
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(
        defaults,
        # -1 means random, as for llama.cpp.
        seed=secrets.randbits(31) if seed in (None, -1) else seed % 2**63,
        logits_options=merge_options(defaults.logits_options, asked),
        **fit_filters(chosen),
    )
