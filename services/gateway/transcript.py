"""An answer as it comes in: what each message of the orchestrator adds to it."""

from dataclasses import dataclass, field

from protocol.messages import Finished, Text


@dataclass(frozen=True)
class Piece:
    """What one message adds."""

    content: str
    origins: list[tuple[str, str]] = field(default_factory=list)
    """Where each token came from, and the text that became certain with it."""


@dataclass
class Transcript:
    """One answer."""

    content: str = ""
    tokens: int = 0
    finished: Finished | None = None

    def push(self, text: Text) -> Piece:
        """Take in newly emitted text."""
        self.content += text.text
        self.tokens += len(text.tokens)
        # Text that was held back until the end belongs to no token.
        pairs = zip(text.origins, text.pieces, strict=False)
        return Piece(text.text, list(pairs) if text.origins else [])
