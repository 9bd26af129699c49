"""The published heads in plain numpy, written from their descriptions: what ours must equal.

One row at a time, in float64, without caches: slow and plain.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Tensors = dict[str, Array]
Ids = list[int]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    normed: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return normed


def silu(x: Array) -> Array:
    result: Array = x / (1.0 + np.exp(-x))
    return result


def rotate(x: Array, position: int, theta: float, share: float = 1.0) -> Array:
    """The first `share` of [heads, size], halves against each other."""
    size = int(x.shape[-1] * share)
    half = size // 2
    angles = position * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = x[:, :half], x[:, half:size]
    turned = [first * cos - second * sin, second * cos + first * sin, x[:, size:]]
    return np.concatenate(turned, axis=-1)


def mlp(x: Array, tensors: Tensors, prefix: str) -> Array:
    gate, up, down = (tensors[f"{prefix}{n}_proj.weight"] for n in ("gate", "up", "down"))
    result: Array = down @ (silu(gate @ x) * (up @ x))
    return result


class Attention:
    """Rows of keys and values, and what a query sees of them."""

    def __init__(self, tensors: Tensors, prefix: str, config: dict[str, Any], eps: float) -> None:
        self.t, self.p, self.eps = tensors, prefix, eps
        self.heads = int(config["num_attention_heads"])
        self.kv_heads = int(config["num_key_value_heads"])
        self.size = int(config["head_dim"])
        rope = config.get("rope_parameters") or {}
        self.theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
        self.share = float(rope.get("partial_rotary_factor", 1.0))

    def _normed(self, x: Array, name: str) -> Array:
        weight = self.t.get(f"{self.p}{name}.weight")
        return x if weight is None else rms_norm(x, weight, self.eps)

    def key_value(self, x: Array, position: int) -> tuple[Array, Array]:
        keys = (self.t[f"{self.p}k_proj.weight"] @ x).reshape(self.kv_heads, self.size)
        values = (self.t[f"{self.p}v_proj.weight"] @ x).reshape(self.kv_heads, self.size)
        return rotate(self._normed(keys, "k_norm"), position, self.theta, self.share), values

    def __call__(self, x: Array, position: int, seen: list[tuple[Array, Array]]) -> Array:
        queries = (self.t[f"{self.p}q_proj.weight"] @ x).reshape(self.heads, -1)
        gate = np.ones(self.heads * self.size)
        if queries.shape[1] == 2 * self.size:
            gate = 1.0 / (1.0 + np.exp(-queries[:, self.size :].reshape(-1)))
            queries = queries[:, : self.size]
        queries = rotate(self._normed(queries, "q_norm"), position, self.theta, self.share)
        groups = queries.reshape(self.kv_heads, -1, self.size)
        keys, values = (np.stack(rows, axis=1) for rows in zip(*seen, strict=True))
        scores = groups @ keys.swapaxes(1, 2) / np.sqrt(self.size)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = (weights @ values).reshape(-1)
        result: Array = self.t[f"{self.p}o_proj.weight"] @ (out * gate)
        return result


class Eagle3Reference:
    """EAGLE-3: rows of (token, the target's states before it), one after the other."""

    def __init__(self, tensors: Tensors, config: dict[str, Any], embedding: Array) -> None:
        self.t, self.config = tensors, config
        self.eps = float(config["rms_norm_eps"])
        self.embedding = tensors.get("embed_tokens.weight", embedding)
        self.head = tensors.get("lm_head.weight", embedding)
        self.attention = Attention(tensors, "midlayer.self_attn.", config, self.eps)

    def fuse(self, states: list[Array]) -> Array:
        """One token's states, layer by layer, as the head takes them."""
        if self.config.get("fc_norm"):
            states = [
                rms_norm(s, self.t[f"fc_norm.{i}.weight"], self.eps) for i, s in enumerate(states)
            ]
        joint = np.concatenate(states)
        if self.config.get("norm_before_fc"):
            joint = rms_norm(joint, self.t["input_norm.weight"], self.eps)
        result: Array = self.t["fc.weight"] @ joint
        return result

    def row(
        self, token: int, state: Array, position: int, seen: list[tuple[Array, Array]]
    ) -> tuple[Array, Array]:
        """Logits by the target's ids and the stand-in for the next state; `seen` grows."""
        t, eps = self.t, self.eps
        embedded = rms_norm(self.embedding[token], t["midlayer.input_layernorm.weight"], eps)
        hidden = rms_norm(state, t["midlayer.hidden_norm.weight"], eps)
        x = np.concatenate([embedded, hidden])
        seen.append(self.attention.key_value(x, position))
        residual = hidden if self.config.get("norm_before_residual") else state
        residual = residual + self.attention(x, position, seen)
        normed = rms_norm(residual, t["midlayer.post_attention_layernorm.weight"], eps)
        residual = residual + mlp(normed, t, "midlayer.mlp.")
        last = rms_norm(residual, t["norm.weight"], eps)
        logits = np.full(len(self.embedding), -np.inf)
        rows = self.head @ last
        ids = np.arange(len(rows)) + t.get("d2t", np.zeros(len(rows))).astype(int)
        logits[ids] = rows
        return logits, last if self.config.get("norm_output") else residual


class MtpReference:
    """MTP of Qwen 3.5: (token, the target's last state before it, after its final norm)."""

    def __init__(self, tensors: Tensors, config: dict[str, Any], embedding: Array) -> None:
        """The norms' weights are given as they are stored, less one."""
        self.t = {n: a + 1.0 if "norm" in n else a for n, a in tensors.items()}
        self.eps = float(config["rms_norm_eps"])
        self.embedding = embedding
        self.attention = Attention(self.t, "mtp.layers.0.self_attn.", config, self.eps)

    def fuse(self, states: list[Array]) -> Array:
        """The state as it is."""
        return states[0]

    def row(
        self, token: int, state: Array, position: int, seen: list[tuple[Array, Array]]
    ) -> tuple[Array, Array]:
        """Logits and the stand-in for the next state; `seen` grows."""
        t, eps = self.t, self.eps
        e = rms_norm(self.embedding[token], t["mtp.pre_fc_norm_embedding.weight"], eps)
        h = rms_norm(state, t["mtp.pre_fc_norm_hidden.weight"], eps)
        z = t["mtp.fc.weight"] @ np.concatenate([e, h])
        x = rms_norm(z, t["mtp.layers.0.input_layernorm.weight"], eps)
        seen.append(self.attention.key_value(x, position))
        z = z + self.attention(x, position, seen)
        x = rms_norm(z, t["mtp.layers.0.post_attention_layernorm.weight"], eps)
        z = z + mlp(x, t, "mtp.layers.0.mlp.")
        last = rms_norm(z, t["mtp.norm.weight"], eps)
        return self.embedding @ last, last


class BlockReference:
    """DFlash, DFlash 2 and DSpark: a block of known tokens and masks, over projected states."""

    def __init__(self, tensors: Tensors, config: dict[str, Any], embedding: Array) -> None:
        self.t, self.config = tensors, config
        self.nested = config.get("dflash_config", config)
        self.eps = float(config["rms_norm_eps"])
        self.embedding = tensors.get("embed_tokens.weight", embedding)
        self.head = tensors.get("lm_head.weight", embedding)
        self.layers = [
            Attention(tensors, f"layers.{i}.self_attn.", config, self.eps)
            for i in range(int(config["num_hidden_layers"]))
        ]

    def _norm(self, x: Array, name: str) -> Array:
        return rms_norm(x, self.t[f"{name}.weight"], self.eps)

    def _convolve(
        self, rows: list[Array], name: str, which: int, kernels: list[Array]
    ) -> list[Array]:
        """Each row and those before it in the block, weighted by its own kernel."""
        base = self.t[f"{name}.base_kernel"][which]
        group = int(self.nested["conv_group_size"])
        found = []
        for at, kernel in enumerate(kernels):
            out = np.zeros_like(rows[0])
            for tap in range(len(base)):
                if at >= tap:
                    weight = base[tap] + np.repeat(kernel[which][tap], group)
                    out = out + weight * rows[at - tap]
            found.append(out)
        return found

    def _around(self, rows: list[Array], name: str, sublayer: Any) -> list[Array]:
        """A sublayer between its convolutions, if it has any."""
        if f"{name}.kernel_projection.weight" not in self.t:
            out: list[Array] = sublayer(rows)
            return out
        taps = self.t[f"{name}.base_kernel"].shape[1]
        projection = self.t[f"{name}.kernel_projection.weight"]
        kernels = [(projection @ row).reshape(2, taps, -1) for row in rows]
        inner = sublayer(self._convolve(rows, name, 0, kernels))
        return self._convolve(inner, name, 1, kernels)

    def hidden(self, known: Ids, at: int, states: dict[int, list[Array]]) -> list[Array]:
        """The block's rows after the last norm; `states` of positions before `at`, by layer."""
        block = int(self.nested["block_size"])
        tokens = [*known, *[int(self.nested["mask_token_id"])] * (block - len(known))]
        rows = [self.embedding[token] for token in tokens]
        fused = {
            p: self._norm(self.t["fc.weight"] @ np.concatenate(s), "hidden_norm")
            for p, s in states.items()
        }
        kinds = self.config.get("layer_types", ["full_attention"] * len(self.layers))
        for index, attention in enumerate(self.layers):
            window = int(self.config.get("sliding_window", 0))
            window = window if kinds[index] == "sliding_attention" else 0
            context = [(p, attention.key_value(x, p)) for p, x in fused.items()]

            def attend(
                inputs: list[Array],
                attention: Attention = attention,
                context: list[Any] = context,
                window: int = window,
            ) -> list[Array]:
                own = [(at + i, attention.key_value(x, at + i)) for i, x in enumerate(inputs)]
                outs = []
                for i, x in enumerate(inputs):
                    seen = [kv for p, kv in [*context, *own] if self._sees(at + i, p, window)]
                    outs.append(attention(x, at + i, seen))
                return outs

            prefix = f"layers.{index}."
            inputs = [self._norm(row, f"{prefix}input_layernorm") for row in rows]
            outs = self._around(inputs, f"{prefix}attention_conv", attend)
            rows = [row + out for row, out in zip(rows, outs, strict=True)]
            inputs = [self._norm(row, f"{prefix}post_attention_layernorm") for row in rows]
            outs = self._around(
                inputs,
                f"{prefix}mlp_conv",
                lambda xs, p=prefix: [mlp(x, self.t, f"{p}mlp.") for x in xs],
            )
            rows = [row + out for row, out in zip(rows, outs, strict=True)]
        return [self._norm(row, "norm") for row in rows]

    def _sees(self, query: int, key: int, window: int) -> bool:
        causal = self.config.get("is_causal", bool(window))
        return (not causal or key <= query) and (not window or abs(query - key) < window)

    def scores(self, hidden: Array, before: int) -> Array:
        """What the next token is chosen by, of a slot and the token before it."""
        logits = self.head @ hidden
        if "markov_head.markov_w1.weight" in self.t:
            bias = self.t["markov_head.markov_w2.weight"]
            logits = logits + bias @ self.t["markov_head.markov_w1.weight"][before]
        if "candidate_selector.hidden_projection.weight" in self.t:
            t, prefix = self.t, "candidate_selector."
            context = t[f"{prefix}predecessor_codebook"][before] * (
                t[f"{prefix}hidden_projection.weight"] @ hidden
            )
            best = np.argsort(-logits)[: int(self.nested["selector_top_k"])]
            chosen = np.full(len(logits), -np.inf)
            chosen[best] = logits[best] + t[f"{prefix}successor_codebook"][best] @ context
            logits = chosen
        by_id = np.full(len(self.embedding), -np.inf)
        ids = np.arange(len(logits)) + self.t.get("d2t", np.zeros(len(logits))).astype(int)
        by_id[ids] = logits
        return by_id

    def confidence(self, hidden: Array, before: int) -> float:
        """DSpark's own estimate."""
        both = np.concatenate([hidden, self.t["markov_head.markov_w1.weight"][before]])
        told = self.t["confidence_head.proj.weight"] @ both + self.t["confidence_head.proj.bias"]
        return float(1.0 / (1.0 + np.exp(-told[0])))
