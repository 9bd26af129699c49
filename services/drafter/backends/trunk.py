"""One sequence at a neural drafter: the tokens in its KV, and what was drafted after them."""

from dataclasses import dataclass, field

from protocol.decoding.logits_processor import LogitsProcessor
from protocol.messages import Sampling, Tokens
from services.drafter.backends.base import Outcome
from services.drafter.backends.tree import Tree
from services.kv.cache import KVStore
from services.sampling.candidates import Top, best_bonuses

_REMEMBERED = 64
"""How many of the last tokens have their candidates kept."""


@dataclass
class Trunk:
    """The committed tokens and the chain under verification, without the branches."""

    store: KVStore
    sampling: Sampling
    """The drafter's."""
    tokens: Tokens = field(default_factory=list)
    """As many as the store's length."""
    committed: int = 0
    """How many of them are known to be committed."""
    tops: dict[int, Top] = field(default_factory=dict)
    """Position -> candidates after it (one row), for the recent tokens."""
    tree: Tree | None = None
    shaper: LogitsProcessor | None = None
    """After these tokens, if the request shapes logits."""

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens only."""
        self.store.trim(length)
        del self.tokens[length:]
        if self.shaper is not None:
            self.shaper.rewind(length)
        oldest = length - _REMEMBERED
        self.tops = {p: top for p, top in self.tops.items() if oldest <= p < length}

    def fork(self, chain: Tokens, fan_out: list[int], shift: int) -> list[Outcome]:
        """The outcomes to prepare for: the best bonus tokens at each acceptance length.

        `shift` is `RoundOptions.shift`.
        """
        roots: list[Outcome] = []
        for accepted, wanted in enumerate(fan_out[: len(chain)]):
            position = self.committed + accepted
            best = best_bonuses(self.tops[position], position + 1 + shift, self.sampling)
            rejected = chain[accepted + 1] if accepted + 1 < len(chain) else None
            bonuses = [int(token) for token in best[: wanted + 1] if token != rejected]
            roots += [Outcome(accepted, bonus) for bonus in bonuses[:wanted]]
        return roots
