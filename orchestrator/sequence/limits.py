"""Where an answer ends."""

from dataclasses import dataclass

from protocol.messages import FinishReason, Tokens


@dataclass(frozen=True)
class Limits:
    """What bounds an answer."""

    max_tokens: int
    stop_ids: frozenset[int]
    context_length: int
    """0 means unlimited."""
    vocabulary_size: int = 2**31
    """A drafter's token beyond it is never shown to the target."""

    def ending(
        self, length: int, answered: int, emitted: Tokens
    ) -> tuple[int, FinishReason | None]:
        """How many of these tokens belong to the answer, and why it ends with them if it does.

        A stop token ends the answer and is not part of it.

        Args:
            length: tokens of the sequence so far, prompt included.
            answered: how many of them are the answer's.
            emitted: the tokens that a verification adds.
        """
        room = self.max_tokens - answered
        space = self.context_length - length if self.context_length else room + 1
        for index, token in enumerate(emitted[: min(room, space)]):
            if token in self.stop_ids:
                return index, "stop"
        if len(emitted) >= space and space <= room:
            return space, "context"
        if len(emitted) >= room:
            return room, "length"
        return len(emitted), None

    def room(self, length: int, answered: int) -> int:
        """Longest draft that can still be part of the answer, with a bonus token behind it."""
        room = self.max_tokens - answered - 1
        if self.context_length:
            room = min(room, self.context_length - length - 1)
        return max(0, room)

    def speakable(self, tokens: Tokens) -> int:
        """How many of the first of these tokens are in the vocabulary."""
        wrong = (i for i, token in enumerate(tokens) if not 0 <= token < self.vocabulary_size)
        return next(wrong, len(tokens))
