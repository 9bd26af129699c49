"""The client's side of a request: who asked, the text so far, and what goes back to them."""

from dataclasses import dataclass, field

from orchestrator.sequence import Sequence
from orchestrator.text import StoppableText
from protocol.messages import Origin, Text, Tokens


@dataclass
class Answer:
    """One request between a client and its sequence."""

    peer: bytes
    request: int
    sequence: Sequence
    text: StoppableText
    prompt_tokens: int
    deadline: float | None = None
    """When to stop waiting for the service that the sequence waits for."""
    stopped: bool = field(default=False)
    """A stop string is complete; what the round in flight adds is not part of the answer."""

    def push(self, tokens: Tokens, origins: list[Origin]) -> Text:
        """The message for newly emitted tokens, cut after the one that completes a stop string."""
        pieces: list[str] = []
        for token in tokens:
            pushed = self.text.push(token)
            pieces.append(pushed.text)
            if pushed.stopped:
                self.stopped = True
                break
        used = len(pieces)
        self.sequence.recorder.retract(len(tokens) - used)
        return Text(
            request=self.request, tokens=tokens[:used], origins=origins[:used], pieces=pieces
        )

    def rest(self, text: str) -> Text:
        """The message for text that was held back until the end."""
        return Text(request=self.request, tokens=[], origins=[], pieces=[text])
