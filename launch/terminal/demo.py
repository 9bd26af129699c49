"""`ssd demo`: the same answers decoded plainly and speculatively, and the gain."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from launch.prompts import Prompt
from launch.terminal import console
from launch.terminal.statistics import statistics_table
from protocol.client.client import Client
from protocol.errors import RuntimeFailure
from protocol.messages import ChatMessage, Finished, Generate, Mode, Statistics, Text, Tokens

_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class DemoAnswer:
    """One answer."""

    tokens: Tokens
    finished: Finished

    @property
    def statistics(self) -> Statistics:
        """Statistics of its rounds."""
        return self.finished.statistics


@dataclass(frozen=True)
class DemoResult:
    """A prompt's answers, decoded plainly and speculatively."""

    name: str
    plain: DemoAnswer
    speculative: DemoAnswer

    @property
    def times_as_fast(self) -> float:
        """Speed of the speculative answer over the plain one's; 0 if they are too short."""
        base = self.plain.statistics.tok_s
        return self.speculative.statistics.tok_s / base if base else 0.0

    @property
    def first_difference(self) -> int | None:
        """Position of the first token that differs; None if all are the same."""
        pairs = zip_longest(self.plain.tokens, self.speculative.tokens)
        return next(
            (i for i, (plain, speculative) in enumerate(pairs) if plain != speculative), None
        )


class Demo:
    """Answers prompts in both ways, and streams the text."""

    def __init__(self, client: Client, max_tokens: int, *, statistics: bool) -> None:
        self._client = client
        self._max_tokens = max_tokens
        self._statistics = statistics
        self._out = console.stdout()

    def run(self, prompts: Sequence[Prompt]) -> None:
        """Answer each prompt twice, then sum up."""
        for mode in ("ar", "ssd"):
            for _ in self._events(prompts[0].prompt, mode, _WARM_UP_TOKENS):
                pass  # the first passes of a process compile and load
        results = [self._compare(number, prompts) for number in range(len(prompts))]
        for sentence in summarise(results):
            self._out.print(sentence, style="bold", markup=False)

    def _compare(self, number: int, prompts: Sequence[Prompt]) -> DemoResult:
        prompt = prompts[number]
        name = prompt.category or str(prompt.id)
        self._out.print(
            f"[{number + 1}/{len(prompts)}] {prompt.prompt}", style="bold", markup=False
        )
        self._out.print("plain decoding:", style="dim")
        plain = self._answer(prompt.prompt, "ar")
        self._out.print(f"{_speed(plain)}\n", style="dim")
        legend = " (coloured tokens were drafted)" if self._out.is_terminal else ""
        self._out.print(f"ssd{legend}:", style="dim")
        speculative = self._answer(prompt.prompt, "ssd")
        result = DemoResult(name, plain, speculative)
        gain = f"{_speed(speculative)}, {result.times_as_fast:.2f} times as fast"
        self._out.print(gain, style="dim")
        if self._statistics:
            self._out.print(statistics_table(speculative.finished, len(speculative.tokens)))
        self._out.print()
        return result

    def _answer(self, prompt: str, mode: Mode) -> DemoAnswer:
        tokens: Tokens = []
        for event in self._events(prompt, mode, self._max_tokens):
            if isinstance(event, Finished):
                console.write("\n")
                if event.error:
                    raise RuntimeFailure(f"the answer failed: {event.error}")
                return DemoAnswer(tokens, event)
            tokens += event.tokens
            for piece, origin in zip_longest(event.pieces, event.origins, fillvalue="target"):
                console.write_coloured(self._out, piece, origin)
        raise RuntimeFailure("an answer ended without its end")

    def _events(self, prompt: str, mode: Mode, max_tokens: int) -> Generator[Text | Finished]:
        request = Generate(
            request=self._client.number(),
            messages=[ChatMessage("user", prompt)],
            max_tokens=max_tokens,
            mode=mode,
        )
        return self._client.generate(request)


def _speed(answer: DemoAnswer) -> str:
    return f"{len(answer.tokens)} tokens, {answer.statistics.tok_s:.1f} tok/s"


def summarise(results: Sequence[DemoResult]) -> list[str]:
    """Return two lines: the speed-up, and whether every token is the same."""
    plain_s = sum(result.plain.statistics.decode_s for result in results)
    speculative_s = sum(result.speculative.statistics.decode_s for result in results)
    each = ", ".join(f"{result.name} {result.times_as_fast:.2f}" for result in results)
    faster = (
        f"{plain_s / speculative_s:.2f} times as fast" if speculative_s else "too short to time"
    )
    return [
        f"{faster} as plain decoding: {speculative_s:.1f} s instead of {plain_s:.1f} s ({each}).",
        _compare_tokens(results),
    ]


def _compare_tokens(results: Sequence[DemoResult]) -> str:
    different = [result for result in results if result.first_difference is not None]
    if not different:
        count = sum(len(result.plain.tokens) for result in results)
        return f"Every token is the same: {count} of {count}."
    where = ", ".join(f"{answer.name} from token {answer.first_difference}" for answer in different)
    return (
        f"{len(different)} of {len(results)} answers differ ({where}); "
        "`ssd bench` checks whether that is a rounding tie."
    )
