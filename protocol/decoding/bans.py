"""What a bias leaves no chance, for whoever drafts without looking at logits."""

from collections.abc import Iterator

from protocol.messages import LogitsOptions, Tokens

_DECISIVE = 100.0
"""A bias of this size bans a token, or all the others: OpenAI's largest."""


class BannedTokens:
    """The tokens that a request's bias rules out; none without a shape."""

    def __init__(self, shape: LogitsOptions | None) -> None:
        biases = shape.logit_bias if shape is not None else ()
        self._banned = frozenset(token for token, bias in biases if bias <= -_DECISIVE)
        self._only = frozenset(token for token, bias in biases if bias >= _DECISIVE)

    def count_allowed(self, tokens: Tokens) -> int:
        """How many of these tokens stand before the first that is ruled out."""
        return next(self._ruled_out(tokens), len(tokens))

    def _ruled_out(self, tokens: Tokens) -> Iterator[int]:
        for index, token in enumerate(tokens):
            if token in self._banned or (self._only and token not in self._only):
                yield index
