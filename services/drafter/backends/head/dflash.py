"""DFlash, DFlash 2 and DSpark: a whole block of tokens in one pass.

A block is a few known tokens followed by mask tokens. It attends to itself and to keys and values
that are projected from the target's states, and its last slots predict the masked tokens.
DFlash 2 adds convolutions along the block and rescores candidates by the token before; DSpark adds
a bias from the token before, and a confidence.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from protocol.decoding.sampler import Ids
from protocol.errors import ModelError
from protocol.heads import HeadDescription
from services.drafter.backends.head.layers import HeadAttention, HeadMlp, attention_shape
from services.drafter.backends.head.weights import (
    FOREIGN,
    TargetEnds,
    Tensors,
    fill,
    head_dtype,
    read_tensors,
    trim_ends,
)
from services.sampling.candidates import Top

Context = list[tuple[mx.array, mx.array]]
"""Keys and values per layer, [1, heads, slots, size]."""


class _Convolution(nn.Module):
    """Grouped dynamic causal convolutions along a block, before and after a sublayer."""

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self._taps, self._group = taps, group
        self.base_kernel = mx.zeros((2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)

    def before(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Return [blocks, tokens, width] for the sublayer, and the kernel for `behind`."""
        kernels = self.kernel_projection(x).reshape(*x.shape[:2], 2, self._taps, -1)
        return self._convolve(x, kernels[:, :, 0], self.base_kernel[0]), kernels[:, :, 1]

    def behind(self, x: mx.array, kernel: mx.array) -> mx.array:
        """Convolve the output of the sublayer."""
        return self._convolve(x, kernel, self.base_kernel[1])

    def _convolve(self, x: mx.array, kernel: mx.array, base: mx.array) -> mx.array:
        blocks, tokens, width = x.shape
        grouped = x.reshape(blocks, tokens, -1, self._group)
        out = mx.zeros_like(grouped)
        for tap in range(self._taps):
            shifted = mx.pad(grouped, [(0, 0), (tap, 0), (0, 0), (0, 0)])[:, :tokens]
            fixed = base[tap].reshape(1, 1, -1, self._group)
            out = out + (fixed + kernel[:, :, tap, :, None]) * shifted
        return out.reshape(blocks, tokens, width)


class _Layer(nn.Module):
    def __init__(self, head: HeadDescription, index: int, conv: tuple[int, int] | None) -> None:
        super().__init__()
        config, width = head.config, int(head.config["hidden_size"])
        eps = float(config.get("rms_norm_eps", 1e-6))
        kinds = config.get("layer_types") or []
        slides = bool(kinds) and kinds[index] == "sliding_attention"
        is_causal = config.get("is_causal")
        self._window = int(config["sliding_window"]) if slides else 0
        self._causal = slides if is_causal is None else bool(is_causal)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.self_attn = HeadAttention(attention_shape(head, width, norms=True))
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        self.mlp = HeadMlp(width, int(config["intermediate_size"]))
        if conv is not None:
            self.attention_conv = _Convolution(width, *conv)
            self.mlp_conv = _Convolution(width, *conv)

    def __call__(
        self, x: mx.array, at: int, context: tuple[mx.array, mx.array] | None, first: int
    ) -> mx.array:
        """Compute [blocks, tokens, width]; blocks start at `at`, the context at `first`."""
        slots = 0 if context is None else context[0].shape[2]
        mask = self._mask(x.shape[0], x.shape[1], at, first + np.arange(slots))
        y, kernel = self._before("attention_conv", self.input_layernorm(x))
        x = x + self._behind(
            "attention_conv", self.self_attn.attend_to(y, at, context, mask), kernel
        )
        y, kernel = self._before("mlp_conv", self.post_attention_layernorm(x))
        out: mx.array = x + self._behind("mlp_conv", self.mlp(y), kernel)
        return out

    def _before(self, name: str, x: mx.array) -> tuple[mx.array, mx.array | None]:
        return self[name].before(x) if name in self else (x, None)

    def _behind(self, name: str, x: mx.array, kernel: mx.array | None) -> mx.array:
        out: mx.array = x if kernel is None else self[name].behind(x, kernel)
        return out

    def _mask(self, blocks: int, tokens: int, at: int, context: Any) -> mx.array | None:
        """Return a mask [blocks * tokens, context + blocks * tokens]; None if all is visible."""
        if blocks == 1 and not self._causal and not self._window:
            return None
        queries = at + np.tile(np.arange(tokens), blocks)
        keys = np.concatenate([context, queries])
        query_blocks = np.repeat(np.arange(blocks), tokens)
        key_blocks = np.concatenate([np.full(len(context), -1), query_blocks])
        visible = (key_blocks[None] < 0) | (key_blocks[None] == query_blocks[:, None])
        distances = keys[None] - queries[:, None]
        if self._causal:
            visible &= distances <= 0
        if self._window:
            visible &= np.abs(distances) < self._window
        return mx.array(visible)


class _Selector(nn.Module):
    """DFlash 2: scores candidates by the token before them."""

    def __init__(self, width: int, rows: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = mx.zeros((rows, rank))
        self.successor_codebook = mx.zeros((rows, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def __call__(self, hidden: mx.array, before: mx.array, candidates: mx.array) -> mx.array:
        """Return [rows, candidates] to be added to the candidates' logits."""
        context = self.predecessor_codebook[before] * self.hidden_projection(hidden)
        scores: mx.array = self.successor_codebook[candidates] @ context[:, :, None]
        return scores[..., 0]


class _Markov(nn.Module):
    """DSpark: a low-rank bias that depends on the token before."""

    def __init__(self, rows: int, columns: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(rows, rank)
        self.markov_w2 = nn.Linear(rank, columns, bias=False)


class _Confidence(nn.Module):
    def __init__(self, inputs: int, *, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1, bias=bias)


class BlockHead(nn.Module):
    """A head that drafts blocks.

    Raises:
        ModelError: the files are not those of such a head.
    """

    def __init__(self, head: HeadDescription, ends: TargetEnds) -> None:
        super().__init__()
        self.width = width = int(head.config["hidden_size"])
        eps = float(head.config.get("rms_norm_eps", 1e-6))
        if width != head.target_hidden_size:
            raise ModelError(f"the head {head.folder!r} is not as wide as its target")
        self.block_size = int(head.value("block_size", 16))
        self.mask_token = int(head.value("mask_token_id"))
        self.from_first = head.format == "dspark"
        """True if a slot predicts the token after it, and not its own."""
        self._input_scale = float(head.value("input_embedding_scale", 1.0))
        self._output_scale = float(head.value("output_multiplier", 1.0))
        self._softcap = float(head.value("final_logit_softcapping", 0.0))
        self.top_k = int(head.value("selector_top_k", 0)) if head.format == "dflash2" else 0
        tensors = _plain_names(read_tensors(head, "", head_dtype(ends)))
        self.fc = nn.Linear(len(head.layers) * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        conv = _convolution(head)
        count = int(head.config["num_hidden_layers"])
        self.layers = [_Layer(head, index, conv) for index in range(count)]
        self.norm = nn.RMSNorm(width, eps=eps)
        self._add_choice(head, tensors)
        own = {n: a for n, a in tensors.items() if not n.startswith(FOREIGN)}
        fill(self, own, head)
        self._embed, self._head, self.head_ids = trim_ends(head, ends, tensors)
        ids: Ids | None = self.head_ids
        self.head_size = head.vocabulary_size if ids is None else int(ids.size)

    def _add_choice(self, head: HeadDescription, tensors: Tensors) -> None:
        """Add the layers that choose among the candidates of a slot."""
        if head.format == "dflash2":
            rank = int(head.value("selector_rank"))
            self.candidate_selector = _Selector(self.width, head.vocabulary_size, rank)
        if head.format != "dspark":
            return
        if head.value("markov_head_type", "vanilla") != "vanilla" or head.value(
            "log_snr_conditioning", default=False
        ):
            raise ModelError(f"the head {head.folder!r} is an unknown variant of DSpark")
        if "markov_head.markov_w1.weight" in tensors:
            rows, rank = tensors["markov_head.markov_w1.weight"].shape
            columns = tensors["markov_head.markov_w2.weight"].shape[0]
            self.markov_head = _Markov(rows, columns, rank)
        if "confidence_head.proj.weight" in tensors:
            inputs = tensors["confidence_head.proj.weight"].shape[1]
            self.confidence_head = _Confidence(inputs, bias="confidence_head.proj.bias" in tensors)

    # ------------------------------------------------------------ passes

    def project(self, states: mx.array) -> mx.array:
        """Project [1, tokens, layers * width] of the target to [1, tokens, width]."""
        out: mx.array = self.fc(states)
        return out

    def read(self, states: mx.array, at: int) -> Context:
        """Return keys and values of [1, tokens, width] projected states from position `at` on."""
        normed = self.hidden_norm(states)
        return [layer.self_attn.keys_and_values(normed, at) for layer in self.layers]

    def __call__(self, tokens: mx.array, at: int, context: Context | None, first: int) -> mx.array:
        """Compute [blocks, tokens, width] of blocks [blocks, tokens] that start at `at`.

        Args:
            tokens: the known tokens of each block, then `mask_token` in every other slot.
            at: position of every block's first token.
            context: keys and values of the tokens before; None if there are none.
            first: position of the first token of the context.
        """
        x = self._embed(tokens) * self._input_scale
        for index, layer in enumerate(self.layers):
            x = layer(x, at, None if context is None else context[index], first)
        out: mx.array = self.norm(x)
        return out

    # ------------------------------------------------------------ predictions

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the logits [..., head] of hidden states [..., width]."""
        logits: mx.array = self._head(hidden) * self._output_scale
        if self._softcap > 0.0:
            logits = mx.tanh(logits / self._softcap) * self._softcap
        return logits

    def add_bias(self, logits: mx.array, before: mx.array) -> mx.array:
        """Return logits [rows, head] with the bias of the tokens before them, [rows], added."""
        if "markov_head" not in self:
            return logits
        markov = self.markov_head
        biased: mx.array = logits + markov.markov_w2(markov.markov_w1(before))
        return biased

    def select(self, top: Top, hidden: mx.array, before: mx.array) -> Top:
        """Return the candidates in the selector's order."""
        if "candidate_selector" not in self:
            return top
        added = self.candidate_selector(hidden, before, mx.array(top.ids))
        scores = top.logits + np.array(added.astype(mx.float32))
        order = np.argsort(-scores, axis=-1, kind="stable")
        ranked = np.take_along_axis(scores, order, axis=-1)
        peak = ranked[:, :1]
        totals = peak[:, 0] + np.log(np.exp(ranked - peak).sum(axis=-1))
        return Top(np.take_along_axis(top.ids, order, axis=-1), ranked, totals)

    def confidences(self, hidden: mx.array, before: mx.array) -> list[float] | None:
        """Return the head's own estimate of each row's acceptance, if it makes one."""
        if "confidence_head" not in self:
            return None
        inputs = [hidden]
        if self.confidence_head.proj.weight.shape[1] > self.width:
            inputs.append(self.markov_head.markov_w1(before))
        confidences = mx.sigmoid(self.confidence_head.proj(mx.concatenate(inputs, axis=-1)))
        values: Any = confidences[:, 0].astype(mx.float32).tolist()
        return [float(one) for one in values]


def _convolution(head: HeadDescription) -> tuple[int, int] | None:
    """Return number of taps and group size, if the layers have convolutions."""
    if head.format != "dflash2":
        return None
    return int(head.value("conv_kernel_size")), int(head.value("conv_group_size"))


def _plain_names(tensors: Tensors) -> Tensors:
    """Return the tensors under uniform names, however they were packaged."""
    renamed: Tensors = {}
    for name, array in tensors.items():
        plain = name.removeprefix("model.").removeprefix("draft_model.")
        if plain.startswith("candidate_selector.") and "codebook" in plain:
            plain = plain.removesuffix(".weight")
        renamed[plain] = array
    return renamed
