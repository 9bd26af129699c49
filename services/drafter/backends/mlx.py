"""The neural backend on MLX: tree drafting in one flat forward per depth.

Per sequence there is a *trunk*, the committed tokens and the chain under verification, in the first
slots of a `KVStore`, and one *tree* after it in scratch slots:

1. The chain is fed to the trunk; the row after chain[j] is the drafter's distribution of the bonus
   token if exactly j draft tokens are accepted.
2. Each row forks into its best candidates, without the drafted token, which would have been
   accepted: the branches.
3. Each depth is one forward over the last tokens of all branches. A branch attends to the trunk up
   to its fork and to its own tokens; its RoPE position is not its slot.

Nothing is computed twice: feeding skips what the trunk already holds, and when the outcome was a
branch, its rows move from scratch to the trunk.

On CUDA a kernel grows most branches, and feeds those that were right again (`mlx_persistent`).

Sequences share no pass: at most two are drafted for at a time, and they take turns depth by depth.
"""

import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from protocol.decoding.logits_processor import LogitsProcessor, process_rows
from protocol.decoding.sampling_params import drafter_sampling, uses_rejection
from protocol.decoding.token_tree import TokenTree, read_tree
from protocol.messages import Sampling, Tokens
from protocol.settings import DraftWeights
from services.drafter.backends.base import (
    DEFAULT_ROUND_OPTIONS,
    MAX_DRAFT_TOKENS,
    BackendIdentity,
    Outcome,
    RoundOptions,
    TreeLayer,
    to_layer,
)
from services.drafter.backends.draft_weights import use_weights
from services.drafter.backends.growth import (
    Tip,
    begin_tips,
    draft_tokens,
    grow_layer,
    lay_out,
    name_candidates,
)
from services.drafter.backends.mlx_ahead import DraftsAhead
from services.drafter.backends.mlx_persistent import PersistentDrafts, try_persistent
from services.drafter.backends.mlx_states import find_states, is_recurrent
from services.drafter.backends.mlx_tree import Bud, Tree, Trunk
from services.engine.batch import Batch, BatchPart
from services.engine.chunked_prefill import LEAST_CHUNK, ChunkSizer
from services.engine.packing import enable_packing
from services.engine.pass_memory import PassMemory
from services.engine.runner import ModelRunner
from services.kernels.cpu.decoder import fill_only
from services.kernels.cpu.equip import takes
from services.kernels.cuda.attention import fit_chunk
from services.kernels.register import kernels
from services.kv.branching import BranchingState
from services.kv.budget import measure_kv
from services.kv.cache import KVStore
from services.kv.prefix_cache import CachedPrefix, PrefixCache
from services.mlx.fused_linear import fuse_linears
from services.mlx.lm_head import trim_head
from services.mlx.loader import LoadedModel, load
from services.mlx.rope import allow_branches, has_rope
from services.runtime.preparation import Steps
from services.runtime.sequence_table import TRIAL_SEQUENCE, SequenceTable, check_rewind
from services.sampling.candidates import Top
from services.sampling.device import best_of

_FEW = 7
"""Committed tokens that are fed with the next pending one: one pass, instead of another before."""

_TRIAL_TOKENS, _TRIAL_DEPTH, _TRIAL_FAN_OUT = 90, 4, [1, 2, 1, 4]
"""Distinct tokens of trial prompts, drafted ones, and outcomes."""


class MlxBackend:
    """Draft backend on MLX; see `base.DraftBackend`."""

    _feeds_by_depth = False
    """True if a token can be fed only after the one before it."""

    def __init__(
        self,
        folder: Path,
        prefill_step_size: int,
        unit: str = "",
        prompts: PrefixCache | None = None,
        loaded: LoadedModel | None = None,
        *,
        weights: DraftWeights = "float",
    ) -> None:
        """Load the model in `folder`, unless given as `loaded`, with its head already trimmed."""
        is_given, loaded = loaded is not None, loaded or load(folder, as_stored=takes)
        self._prompts = prompts if prompts is not None else PrefixCache()
        self._model, self._folder = loaded.module, folder
        self._head_ids = None if is_given else trim_head(self._model, folder, kernels().widest_head)
        self._bucketed, self._on_gpu = kernels().plans_shapes, kernels().on_gpu
        self._equip(weights)
        self._chunk_sizer = ChunkSizer(prefill_step_size, short=True)
        self._new_store = find_states(self._model, bucketed=self._bucketed)
        enable_packing(self._model)  # its attention by our kernels
        kv = measure_kv(self._model, self._new_store)
        self._memory = PassMemory(self._model, kv, self._prompts.drop_oldest, logits=True)
        self._runner = ModelRunner(self._model, memory=self._memory)
        self._filler = ModelRunner(fill_only(self._model), memory=self._memory)
        self._sequences: SequenceTable[Trunk] = SequenceTable()
        self.identity = BackendIdentity(
            backend="mlx",
            model=str(folder),
            tokenizer_fingerprint=loaded.vocabulary.fingerprint,
            vocabulary_size=loaded.vocabulary.size,
            context_length=loaded.context_length,
            compute_unit=unit or kernels().device,
            max_draft_tokens=MAX_DRAFT_TOKENS,
            takes_trees=isinstance(self._new_store(), KVStore),
        )
        self._head_size = loaded.vocabulary.size if self._head_ids is None else len(self._head_ids)
        self.ahead: DraftsAhead | None = None  # None: every depth is awaited
        if self._on_gpu and not self._feeds_by_depth and self.identity.takes_trees:
            self.ahead = DraftsAhead(self._runner, self._head_ids, self._head_size)

    def try_kernels(self) -> Steps[None]:
        """Let blocks use our kernels where that pays."""
        if (equip_traces := kernels().equip) is not None:
            yield from equip_traces(self._model)

    def try_drafts(self) -> Steps[None]:
        """Let a kernel compute whole drafts where that pays."""
        if self.ahead is not None:
            yield from try_persistent(self._model, self.ahead.ids, self._use, self._try_draft)
            self.close(TRIAL_SEQUENCE)

    def _use(self, persistent: PersistentDrafts | None) -> None:
        if self.ahead is not None:
            self.ahead.persistent = persistent

    def _try_draft(self, trial: int, sampling: Sampling) -> tuple[list[TreeLayer], float]:
        """Draft a few tokens after one of several prompts; see `mlx_persistent.Draft`."""
        prompt = [(7 * trial + token) % _TRIAL_TOKENS for token in range(4 + 60 * trial)]
        for _ in self.open(TRIAL_SEQUENCE, prompt, sampling):
            pass
        began = time.perf_counter()
        drafted = list(self.draft(TRIAL_SEQUENCE, trial, _TRIAL_DEPTH))
        took = time.perf_counter() - began
        tree = read_tree([trial, *prompt[: len(_TRIAL_FAN_OUT) - 1]])
        prepared = list(self.prepare(TRIAL_SEQUENCE, tree, _TRIAL_FAN_OUT, _TRIAL_DEPTH))
        return [layer for layer in (drafted[0], prepared[0]) if layer is not None], took

    def _equip(self, weights: DraftWeights) -> None:
        """Optimise the model for this device: rotations, weights, joint products."""
        use_weights(self._model, weights)
        if has_rope(self._model) or not is_recurrent(self._model):
            allow_branches(self._model)
        if self._bucketed:
            fuse_linears(self._model)

    def open(self, sequence: int, tokens: Tokens, sampling: Sampling) -> Generator[None]:
        """Prefill in chunks; may be abandoned between two."""
        running = [CachedPrefix(trunk.tokens, trunk.store) for trunk in self._sequences.values()]
        store = self._prompts.fork(tokens, running)
        if not isinstance(store, KVStore | BranchingState):
            store = self._new_store()
        opened = Trunk(store, drafter_sampling(sampling))
        while store.length < len(tokens):
            began = time.perf_counter()
            left = len(tokens) - store.length
            size = self._chunk_sizer.size(alone=not self._sequences, left=left)
            size = self._memory.fit(store, size, least=min(size, LEAST_CHUNK))
            size = fit_chunk(self._model, size, store.length) if self._bucketed else size
            chunk = tokens[store.length : store.length + size]
            part = BatchPart(store, len(chunk), partial(store.chain, len(chunk)), chunk)
            self._filler.run(Batch([part]))
            store.evaluate()
            self._chunk_sizer.observe(len(chunk), time.perf_counter() - began)
            yield
        opened.tokens, opened.sequence = list(tokens), list(tokens)
        opened.committed = opened.agreed = len(tokens)
        if sampling.logits_options is not None:
            opened.processor = LogitsProcessor(
                sampling.logits_options, self._folder, tokens, self._head_ids
            )
        self._sequences[sequence] = opened

    def commit(self, sequence: int, base: int, tokens: Tokens) -> None:
        """Record the committed tokens; a few missing ones are fed with the next pending token."""
        trunk = self._sequences[sequence]
        check_rewind(trunk.committed, base)
        trunk.agreed = min(trunk.agreed, base)
        trunk.sequence[base:] = tokens
        trunk.committed = len(trunk.sequence)
        if trunk.committed - trunk.agree(trunk.sequence) > _FEW:
            list(self._feed(trunk, trunk.committed, [], 0, trunk.width(1)))

    def prepare(
        self,
        sequence: int,
        tree: TokenTree,
        fan_out: list[int],
        depth: int,
        options: RoundOptions = DEFAULT_ROUND_OPTIONS,
    ) -> Generator[TreeLayer | None]:
        """Fork every row of the tree, then grow all branches depth by depth."""
        trunk = self._sequences[sequence]
        trunk.prepares = True
        if self.ahead is not None and self._goes_ahead(trunk):
            layers = self.ahead.prepare(trunk, tree, fan_out, depth, options)
            if layers is not None:
                yield from layers
                return
        excluded = max(1, *map(len, tree.children))
        width = trunk.width(max(fan_out, default=0) + excluded)
        stem, base = tree.tokens[: tree.stem], trunk.committed
        held = tree.stem
        if len(tree) > tree.stem and not self._feeds_by_depth:
            # Missing tokens of the stem are fed together with the rows, in one pass.
            held = max(0, self._keep(trunk, trunk.sequence + stem, base, width) - base)
        yield from self._feed(trunk, base, stem[:held], rows=held, width=width)
        trunk.cut(base + held)
        trunk.tree = Tree(base, stem[:held])
        tops = [trunk.tops[base + row] for row in range(held)]
        layout = lay_out(tree, base, held=held, by_depth=self._feeds_by_depth)
        tops_by_row: dict[int, Top] = {}
        for level in layout.levels:
            top = self._feed_buds(trunk, [bud for _, bud in level], width)
            tops_by_row |= {row: top.only(at) for at, (row, _) in enumerate(level)}
        tops += [tops_by_row[row] for row in range(held, len(tree))]
        roots = trunk.fork(tree, tops, fan_out, options.shift)
        tips = begin_tips(roots, layout.places)
        yield from self._grow(trunk, roots, tips, depth, options)

    def draft(
        self, sequence: int, pending: int, count: int, options: RoundOptions = DEFAULT_ROUND_OPTIONS
    ) -> Generator[TreeLayer | None]:
        """Draft one continuation on the trunk, one token per forward; with siblings, a tree."""
        trunk = self._sequences[sequence]
        if options.siblings:
            yield from self._draft_tree(trunk, pending, count, options)
            return
        if self.ahead is not None and count and self._goes_ahead(trunk):
            desired = [*trunk.sequence, pending]
            keep = self._keep(trunk, desired, len(desired), 1)
            trunk.cut(min(keep, trunk.committed))
            yield from self.ahead.draft(trunk, desired[len(trunk.tokens) :], count, options)
            return
        width = trunk.width(1)
        tail = [pending]
        for _ in range(count):
            yield from self._feed(trunk, trunk.committed, tail, rows=1, width=width)
            position = trunk.committed + len(tail)
            trunk.cut(position)
            [drafted] = draft_tokens(trunk.tops[position - 1], [position], trunk.sampling, options)
            yield to_layer(drafted)
            tail = [*tail, drafted.token]

    def close(self, sequence: int) -> None:
        """Free the KV, except what another sequence may fork."""
        trunk = self._sequences.pop(sequence, None)
        if trunk is not None and sequence != TRIAL_SEQUENCE:
            self._prompts.keep(CachedPrefix(trunk.tokens, trunk.store))

    def _draft_tree(
        self, trunk: Trunk, pending: int, count: int, options: RoundOptions
    ) -> Generator[TreeLayer | None]:
        """Draft a tree of one branch after the committed tokens."""
        yield from self._feed(trunk, trunk.committed, [], rows=0)
        trunk.cut(trunk.committed)
        trunk.tree = Tree(trunk.committed, [])
        tip = Tip(pending, -1, trunk.committed - 1, 0)
        yield from self._grow(trunk, [Outcome(0, pending)], [tip], count, options)

    def _feed(
        self, trunk: Trunk, base: int, tokens: Tokens, rows: int, width: int = 1
    ) -> Generator[None]:
        """Make the trunk the committed tokens before `base` and these, computing missing ones.

        Afterwards `trunk.tops` has at least `width` candidates after each of the last `rows`
        tokens.
        """
        desired = trunk.sequence[:base] + tokens
        keep = self._keep(trunk, desired, len(desired) - rows, width)
        if keep < len(desired):
            keep = trunk.store.resumable(keep)
            trunk.cut(keep)
            self._append(trunk, desired[keep:], width if rows else 0)
        yield from ()  # heads pause between the pieces of a prompt

    def _keep(self, trunk: Trunk, desired: Tokens, first_row: int, width: int) -> int:
        """Return how many `desired` tokens are present, from `first_row` on with candidates.

        A tree's tokens among them are moved to the trunk.
        """
        keep = self._adopt(trunk, desired, trunk.agree(desired), first_row, width)
        width = min(width, self._head_size)
        return next((at for at in range(first_row, keep) if trunk.width_at(at) < width), keep)

    def _adopt(self, trunk: Trunk, desired: Tokens, keep: int, first_row: int, width: int) -> int:
        """If `desired` continues along a path of the tree, move that path to the trunk.

        Its tokens from `first_row` on have their candidates then.
        """
        tree = trunk.tree
        if tree is None or keep >= len(desired):
            return keep
        path = tree.follow(desired, keep)
        if not path:
            trunk.tree = None
            return keep
        trunk.cut(keep)
        trunk.store.move([tree.trunk + index for index in path])
        tree.lost = max(tree.lost, keep + len(path))
        trunk.tokens = desired[: keep + len(path)]
        if trunk.processor is not None:
            trunk.processor.extend(trunk.tokens[keep:])
        rows = [(at, index) for at, index in enumerate(path, start=keep) if at >= first_row]
        if rows:
            top = best_of(tree.logits([at for _, at in rows]), width, self._head_ids)
            trunk.tops |= {at: top.only(row) for row, (at, _) in enumerate(rows)}
        return keep + len(path)

    def _append(self, trunk: Trunk, tokens: Tokens, width: int) -> None:
        start = len(trunk.tokens)
        logits = self._forward(trunk, tokens, partial(trunk.store.chain, len(tokens)))
        trunk.tokens.extend(tokens)
        # A tree's scratch slots lie right after the old trunk: they are overwritten now.
        trunk.tree = None
        if not width:
            trunk.store.evaluate()
            if trunk.processor is not None:
                trunk.processor.extend(tokens)
            return
        rows = process_rows(trunk.processor, tokens, self._rows(logits, trunk.processor))
        top = best_of(rows, width, self._head_ids)
        trunk.tops |= {start + row: top.only(row) for row in range(len(tokens))}

    def _forward(self, trunk: Trunk, tokens: Tokens, place: Callable[[], None]) -> mx.array:
        """Return logits [tokens, head] of a pass; `place` sets its span."""
        part = BatchPart(trunk.store, len(tokens), place, tokens, self._inputs(trunk))
        return self._runner.run(Batch([part]))[0].logits

    def _inputs(self, trunk: Trunk) -> Callable[[], mx.array] | None:  # noqa: ARG002
        """Return the model's inputs besides tokens: see `BatchPart`."""
        return None

    def _grow(
        self,
        trunk: Trunk,
        roots: list[Outcome],
        tips: list[Tip],
        depth: int,
        options: RoundOptions,
    ) -> Generator[TreeLayer | None]:
        """Yield depth by depth the successors of these bonus tokens."""
        if uses_rejection(trunk.sampling):
            options = options._replace(siblings=0)  # drawn tokens have no siblings
        width = trunk.width(1 + options.siblings)
        for _ in range(depth if tips else 0):
            tree = trunk.tree
            if tree is None:
                return
            buds = [Bud(tip.token, tip.parent, tip.fork) for tip in tips]
            first = len(tree.fed)
            positions = [tree.position(bud) + 1 for bud in buds]
            top = self._feed_buds(trunk, buds, width)
            candidates = name_candidates(top, positions, trunk.sampling, options)
            layer, tips = grow_layer(roots, tips, candidates, first, options)
            yield layer

    def _goes_ahead(self, trunk: Trunk) -> bool:
        """Return whether each draft token is the first choice of the model itself."""
        drawn = trunk.processor is not None or uses_rejection(trunk.sampling)
        return not drawn and self._inputs(trunk) is None

    def _feed_buds(self, trunk: Trunk, buds: list[Bud], width: int) -> Top:
        """Feed these to the tree; return the candidates after each."""
        tree = trunk.tree
        if tree is None:
            raise ValueError("there is no tree to be fed")
        tokens = [bud.token for bud in buds]
        place = partial(trunk.store.place, tree.span(buds))
        logits = self._forward(trunk, tokens, place)
        rows = tree.add(buds, self._rows(logits, trunk.processor), trunk.processor)
        return best_of(rows, width, self._head_ids)

    def _rows(self, logits: mx.array, processor: LogitsProcessor | None) -> Any:
        """Return [rows, head] without a padded head's columns that have no token."""
        rows = logits[:, : self._head_size]
        if self._on_gpu and processor is None:
            return rows
        return np.array(rows.astype(mx.float32), copy=False)
