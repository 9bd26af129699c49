"""The neural backend on MLX: tree drafting in one flat forward per depth.

Per sequence there is a *trunk*, the committed tokens and the chain under verification, in
the first slots of a `KVStore`, and one *tree* behind it in scratch slots:

1. The chain is fed to the trunk; the row after chain[j] is the draft's distribution of the bonus
   token if exactly j draft tokens are accepted.
2. Each row forks into its best candidates, without the drafted token, which would have been
   accepted: the branches.
3. Each depth is one forward over the last tokens of all branches. A branch sees the trunk up
   to its fork and its own tokens; its RoPE position is not its slot.

Nothing is computed twice: feeding skips what the trunk already holds, and when the outcome
was a branch, its rows move from scratch to the trunk.

Where several sequences are drafted for, each yields before its forward, so that those that
wait at the same time share one (`batching`).
"""

import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from protocol.decoding.logits_processor import LogitsProcessor, process_rows
from protocol.decoding.sampling_params import drafter_sampling, is_greedy
from protocol.decoding.tokens import common_prefix_length
from protocol.messages import Sampling, Tokens
from services.batching.chunked_prefill import ChunkSizer
from services.batching.forward import Batcher, most_rows
from services.batching.packing import supports_packing
from services.drafter.backends.base import (
    DEFAULT_ROUND_OPTIONS,
    BackendIdentity,
    DraftedToken,
    Outcome,
    RoundOptions,
    TreeLayer,
)
from services.drafter.backends.mlx_tree import Tree, Trunk, scratch_positions, visible
from services.kv.branching import BranchingState
from services.kv.cache import KVStore, windows_of
from services.kv.prefix_cache import CachedPrefix, PrefixCache
from services.kv.rewinding import find_branching
from services.mlx.fused_linear import fuse_linears
from services.mlx.lm_head import trim_head
from services.mlx.loader import compute_unit, load
from services.mlx.rope import allow_branches, use_tables
from services.runtime.sequence_table import SequenceTable, check_rewind
from services.sampling.candidates import draft_tokens
from services.sampling.device import best_of

MAX_DRAFT_TOKENS = 64

_SAMPLED_WIDTH = 64
"""Candidates per row when noise decides: the best by logit are rarely the best by score.
Under the rejection rule, the tokens of the distribution that a draft token is drawn from."""


class MlxBackend:
    """See `base.DraftBackend`."""

    def __init__(
        self,
        folder: Path,
        prefill_step_size: int,
        unit: str = "",
        prompts: PrefixCache | None = None,
    ) -> None:
        loaded = load(folder)
        self._prompts = prompts if prompts is not None else PrefixCache()
        self._model = loaded.module
        if compute_unit() == "cpu":
            use_tables(self._model)
        if any(type(cache) is not ArraysCache for cache in make_prompt_cache(self._model)):
            allow_branches(self._model)
        self._folder = folder
        self._head_ids = trim_head(self._model, folder)
        self._chunk_sizer = ChunkSizer(prefill_step_size)
        self._bucketed = compute_unit() == "cuda"
        if self._bucketed:
            fuse_linears(self._model)
        self._new_store = self._find_store()
        shares = supports_packing(self._model, self._new_store)
        self._batcher = Batcher(self._model, most_rows() if shares else 0)
        self._on_gpu = compute_unit() != "cpu"
        self._sequences: SequenceTable[Trunk] = SequenceTable()
        self.identity = BackendIdentity(
            backend="mlx",
            model=str(folder),
            tokenizer_fingerprint=loaded.vocabulary.fingerprint,
            vocabulary_size=loaded.vocabulary.size,
            context_length=loaded.context_length,
            compute_unit=unit or compute_unit(),
            max_draft_tokens=MAX_DRAFT_TOKENS,
        )
        self._head_size = loaded.vocabulary.size if self._head_ids is None else len(self._head_ids)

    def _find_store(self) -> Callable[[], KVStore | BranchingState]:
        """Makes the states of sequences: slots, beside recurrent states if it has such layers."""
        recurrent = any(type(cache) is ArraysCache for cache in make_prompt_cache(self._model))
        if recurrent:
            return find_branching(self._model, bucketed=self._bucketed)
        windows = windows_of(self._model)
        return lambda: KVStore(windows, bucketed=self._bucketed)

    # ------------------------------------------------------------ DraftBackend

    def open(self, sequence: int, tokens: Tokens, sampling: Sampling) -> Generator[None]:
        """Prefill in chunks; may be abandoned between two."""
        running = [CachedPrefix(known.tokens, known.store) for known in self._sequences.values()]
        store = self._prompts.fork(tokens, running)
        if not isinstance(store, KVStore | BranchingState):
            store = self._new_store()
        opened = Trunk(store, drafter_sampling(sampling))
        while store.length < len(tokens):
            began = time.perf_counter()
            size = self._chunk_sizer.size(alone=not self._sequences)
            chunk = tokens[store.length : store.length + size]
            store.chain(len(chunk))
            self._model(mx.array(chunk)[None], cache=store.caches)
            store.evaluate()
            self._chunk_sizer.observe(len(chunk), time.perf_counter() - began)
            yield
        opened.tokens = list(tokens)
        opened.committed = len(tokens)
        if sampling.logits_options is not None:
            opened.processor = LogitsProcessor(
                sampling.logits_options, self._folder, tokens, self._head_ids
            )
        self._sequences[sequence] = opened

    def commit(self, sequence: int, base: int, tokens: Tokens) -> None:
        """Note the committed tokens; what the trunk or the tree holds of them is kept."""
        known = self._sequences[sequence]
        check_rewind(known.committed, base)
        for _ in self._feed(known, base, tokens, rows=0):
            pass  # it cannot wait for company
        known.committed = base + len(tokens)

    def prepare(
        self,
        sequence: int,
        chain: Tokens,
        fan_out: list[int],
        depth: int,
        options: RoundOptions = DEFAULT_ROUND_OPTIONS,
    ) -> Generator[TreeLayer | None]:
        """Fork every row of the chain, then grow all branches depth by depth."""
        known = self._sequences[sequence]
        width = self._width(known.sampling, max(fan_out, default=0) + 1)
        yield from self._feed(known, known.committed, chain, rows=len(chain), width=width)
        known.cut(known.committed + len(chain))
        roots = known.fork(chain, fan_out, options.shift)
        if not roots:
            return
        branches = {root: index for index, root in enumerate(roots)}
        tree = known.tree = Tree(known.committed, branches, [], [], [])
        tokens = [root.bonus for root in roots]
        for _ in range(depth):
            grown = yield from self._grow(known, tree, roots, tokens, options)
            tokens = [draft.token for draft in grown]
            distributions = [draft.distribution for draft in grown if draft.distribution.tokens]
            yield TreeLayer(roots, tokens, [draft.confidence for draft in grown], distributions)

    def draft(
        self, sequence: int, pending: int, count: int, options: RoundOptions = DEFAULT_ROUND_OPTIONS
    ) -> Generator[DraftedToken | None]:
        """One continuation on the trunk, one token per forward."""
        known = self._sequences[sequence]
        width = self._width(known.sampling, 1)
        tail = [pending]
        for _ in range(count):
            yield from self._feed(known, known.committed, tail, rows=1, width=width)
            position = known.committed + len(tail)
            known.cut(position)
            [found] = draft_tokens(known.tops[position - 1], [position], known.sampling, options)
            yield found
            tail = [*tail, found.token]

    def close(self, sequence: int) -> None:
        """Free the KV, but for what another sequence may take from it."""
        known = self._sequences.pop(sequence, None)
        if known is not None:
            self._prompts.keep(CachedPrefix(known.tokens, known.store))

    # ------------------------------------------------------------ the trunk

    @staticmethod
    def _width(sampling: Sampling, wanted: int) -> int:
        return wanted if is_greedy(sampling) else max(wanted, _SAMPLED_WIDTH)

    def _feed(
        self, known: Trunk, base: int, tokens: Tokens, rows: int, width: int = 1
    ) -> Generator[None]:
        """Make the trunk start with `tokens[:base] + tokens`, computing only what it lacks.

        Afterwards `known.tops` has the candidates after each of the last `rows` of them, at
        least `width` wide.
        """
        wanted = known.tokens[:base] + tokens
        keep = base + common_prefix_length(known.tokens[base:], tokens)
        keep = self._adopt(known, wanted, keep, width)
        first_row = len(wanted) - rows
        for position in range(first_row, keep):
            top = known.tops.get(position)
            if top is None or top.ids.shape[1] < min(width, self._head_size):
                keep = position
                break
        if keep < len(wanted):
            keep = known.store.resumable(keep)
            known.cut(keep)
            yield from self._append(known, wanted[keep:], width if rows else 0)

    def _adopt(self, known: Trunk, wanted: Tokens, keep: int, width: int) -> int:
        """If `wanted` goes on along a branch of the tree, move that branch to the trunk."""
        tree = known.tree
        if tree is None or keep >= len(wanted):
            return keep
        branch = tree.branches.get(Outcome(keep - tree.pending_at - 1, wanted[keep]))
        known.tree = None
        if branch is None:
            return keep
        fed = [layer[branch] for layer in tree.fed]
        count = common_prefix_length(fed, wanted[keep:])
        known.cut(keep)
        known.store.move([slot + branch for slot in tree.slots[:count]])
        known.tokens = wanted[: keep + count]
        if known.processor is not None:
            known.processor.extend(known.tokens[keep:])
        for depth in range(count):
            row = tree.logits[depth][branch : branch + 1]
            known.tops[keep + depth] = best_of(row, width, self._head_ids)
        return keep + count

    def _append(self, known: Trunk, tokens: Tokens, width: int) -> Generator[None]:
        start = len(known.tokens)
        logits = yield from self._forward(known, tokens, partial(known.store.chain, len(tokens)))
        known.tokens.extend(tokens)
        # A tree's scratch slots lie right behind the old trunk: they are overwritten now.
        known.tree = None
        if not width:
            known.store.evaluate()
            if known.processor is not None:
                known.processor.extend(tokens)
            return
        rows = process_rows(known.processor, tokens, self._rows(logits, known.processor))
        top = best_of(rows, width, self._head_ids)
        for row in range(len(tokens)):
            known.tops[start + row] = top.only(row)

    def _forward(
        self, known: Trunk, tokens: Tokens, place: Callable[[], None]
    ) -> Generator[None, None, mx.array]:
        """Logits [tokens, head], after a pause if others may join in; `place` sets the frame."""

        def begin() -> Tokens:
            place()
            return []

        asked = self._batcher.submit(tokens, known.store, begin)
        try:
            if len(self._sequences) > 1:
                yield
            return self._batcher.result(asked)[0]
        finally:
            self._batcher.withdraw(asked)

    # ------------------------------------------------------------ the tree

    def _grow(
        self, known: Trunk, tree: Tree, roots: list[Outcome], tokens: Tokens, options: RoundOptions
    ) -> Generator[None, None, list[DraftedToken]]:
        """Feed one token per branch; returns the next token of each."""
        depth, count = len(tree.fed), len(roots)
        trunk = len(known.tokens)
        start = trunk + depth * count
        forks = np.array([root.accepted for root in roots]) + tree.pending_at
        positions = forks + 1 + depth
        place = partial(
            known.store.branches,
            start,
            np.concatenate([np.arange(trunk), *scratch_positions(forks, depth + 1)]),
            visible(trunk, forks, depth + 1),
        )
        logits = yield from self._forward(known, tokens, place)
        rows = tree.process_logits(
            known.processor, forks, tokens, self._rows(logits, known.processor)
        )
        tree.fed.append(tokens)
        tree.slots.append(start)
        tree.logits.append(rows)
        top = best_of(rows, self._width(known.sampling, 1), self._head_ids)
        return draft_tokens(top, [int(p) + 1 for p in positions], known.sampling, options)

    # ------------------------------------------------------------ the head

    def _rows(self, logits: mx.array, processor: LogitsProcessor | None) -> Any:
        """[rows, head] without the columns of a padded head that stand for no token."""
        rows = logits[:, : self._head_size]
        if self._on_gpu and processor is None:
            return rows
        return np.array(rows.astype(mx.float32), copy=False)
