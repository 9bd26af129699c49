"""A decoder as MIL functions, built directly from its weights without another framework.

The state stores no order: a *slot* is a row of it, the RoPE tables are inputs, and a mask selects
the slots a query attends to. So any tree of branches is a matter of masks, and forking or rewinding
moves nothing.

Inputs: `x` [1, width, 1, tokens] embeddings; `cos`, `sin` [1, head_dim/2, 1, tokens]; `mask_cache`
[1, 1, tokens, slots] and `mask_new` [1, 1, tokens, tokens], 0 or `MASKED`. For layers with a window
also `cos_local`, `sin_local`, `mask_local` [1, 1, tokens, slots + tokens]. With states: `slot` [1],
or `scatter` [1, 1, slots, tokens] and `keep` [1, 1, slots, 1]; without: `past_keys`, `past_values`
[layers, kv_heads, slots, head_dim].

Outputs: `hidden` of a part that is not the last; of a head `values`, `columns`, `peaks`, `sums`;
without states `new_keys`, `new_values` [layers, kv_heads, tokens, head_dim].
"""

from typing import Any, NamedTuple

import numpy as np

from protocol.jobs.convert import StateWrite
from services.coreml.architecture import Architecture
from services.coreml.convert.blocks import (
    OPSET,
    MilFunction,
    MilProgram,
    Var,
    attend,
    best_tokens,
    by_head,
    dense,
    mb,
    rms_norm,
    rotate,
    types,
)
from services.coreml.convert.source import Source
from services.coreml.functions import HEAD_ROWS, PackageFunction, Part


def _ints(values: list[int]) -> Any:
    return np.array(values, np.int32)


class PackageOptions(NamedTuple):
    """Options that all functions of a package share."""

    part: Part
    slots: int
    width: int
    """Best tokens that each product of the head returns."""
    state_write: StateWrite


class _Past(NamedTuple):
    """Keys and values before a call: [layers, kv_heads, slots, head_dim] each."""

    keys: Var
    values: Var


class _Sight(NamedTuple):
    """The mask of a layer's queries, and the tables of its RoPE."""

    mask: Var
    cos: Var
    sin: Var


def build(source: Source, plan: PackageOptions, functions: list[PackageFunction]) -> Any:
    """Build the program of one part; the first function is its default."""
    program = MilProgram()
    for function in functions:
        program.add_function(function.name, _Builder(source, plan, function).build())
    program.default_function_name = functions[0].name
    return program


class _Builder:
    def __init__(self, source: Source, plan: PackageOptions, function: PackageFunction) -> None:
        self._source = source
        self._plan = plan
        self._function = function
        self._last_part = plan.part.stop == source.architecture.layers

    @property
    def _model(self) -> Architecture:
        return self._source.architecture

    def build(self) -> Any:
        with MilFunction(self._inputs(), OPSET) as made:
            made.set_outputs(self._body(dict(made.inputs)))
        return made

    def _inputs(self) -> dict[str, Any]:
        model, tokens, slots = self._model, self._function.tokens, self._plan.slots
        kv_shape = (self._plan.part.layers, model.kv_heads, slots, model.head_dim)
        shapes = {
            "x": (1, model.width, 1, tokens),
            "cos": (1, model.head_dim // 2, 1, tokens),
            "sin": (1, model.head_dim // 2, 1, tokens),
            "mask_cache": (1, 1, tokens, slots),
            "mask_new": (1, 1, tokens, tokens),
        }
        if model.window:
            shapes |= {"cos_local": shapes["cos"], "sin_local": shapes["sin"]}
            shapes["mask_local"] = (1, 1, tokens, slots + tokens)
        if not self._function.stateful:
            shapes |= {"past_keys": kv_shape, "past_values": kv_shape}
        elif self._plan.state_write == "onehot":
            shapes |= {"scatter": (1, 1, slots, tokens), "keep": (1, 1, slots, 1)}
        inputs = {name: mb.TensorSpec(shape, types.fp16) for name, shape in shapes.items()}
        if self._function.stateful:
            if self._plan.state_write == "slice":
                inputs["slot"] = mb.TensorSpec((1,), types.int32)
            # One object used twice would become two states of one name.
            inputs["keys"] = mb.StateTensorSpec(kv_shape, types.fp16)
            inputs["values"] = mb.StateTensorSpec(kv_shape, types.fp16)
        return inputs

    def _body(self, given: dict[str, Var]) -> list[Var]:
        mask = mb.concat(values=[given["mask_cache"], given["mask_new"]], axis=3)
        sights = [_Sight(self._by_group(mask, "mask"), given["cos"], given["sin"])]
        if self._model.window:
            mask = self._by_group(given["mask_local"], "mask_of_window")
            sights.append(_Sight(mask, given["cos_local"], given["sin_local"]))
        past = self._past(given)
        x, new_keys, new_values = given["x"], [], []
        for index in range(self._plan.part.layers):
            layer = _Layer(self._source, self._plan.part.first + index, self._function.tokens)
            h = layer.norm(x, "input_layernorm", "attention_norm")
            mask, cos, sin = sights[self._model.is_local(self._plan.part.first + index)]
            key, value = layer.key_value(h, cos, sin)
            new_keys.append(key)
            new_values.append(value)
            if self._is_done_after(index):
                break
            rows = {"begin": [index, 0, 0, 0], "end": [index + 1, *past.keys.shape[1:]]}
            keys = mb.concat(values=[mb.slice_by_index(x=past.keys, **rows), key], axis=2)
            values = mb.concat(values=[mb.slice_by_index(x=past.values, **rows), value], axis=2)
            queries = layer.queries(h, cos, sin)
            x = layer.close(x, attend(queries, keys, values, mask))
        keys = mb.concat(values=new_keys, axis=0, name="new_keys")
        values = mb.concat(values=new_values, axis=0, name="new_values")
        return self._outputs(given, past, (keys, values), x)

    def _by_group(self, mask: Var, name: str) -> Var:
        group = self._model.group
        return mb.concat(values=[mask] * group, axis=2, name=name) if group > 1 else mask

    def _is_done_after(self, index: int) -> bool:
        """Return True if a prefill needs only the keys and values of this layer, the last."""
        last = index == self._plan.part.layers - 1
        return last and self._last_part and not self._function.head

    def _past(self, given: dict[str, Var]) -> _Past:
        if self._function.stateful:
            return _Past(
                mb.read_state(input=given["keys"], name="old_keys"),
                mb.read_state(input=given["values"], name="old_values"),
            )
        return _Past(given["past_keys"], given["past_values"])

    def _outputs(
        self, given: dict[str, Var], past: _Past, new: tuple[Var, Var], x: Var
    ) -> list[Var]:
        outputs = []
        if self._function.stateful:
            self._write(given, past, new)
        else:
            outputs += list(new)
        if not self._last_part:
            outputs.append(mb.identity(x=x, name="hidden"))
        elif self._function.head:
            outputs += self._head(x)
        elif self._function.stateful:
            # CoreML requires an output of every function.
            outputs.append(mb.slice_by_index(x=new[0], begin=[0] * 4, end=[1] * 4, name="done"))
        return outputs

    def _write(self, given: dict[str, Var], past: _Past, new: tuple[Var, Var]) -> None:
        """Write all layers at the end: if a device refuses the write, only the tail falls back."""
        for name, old, rows in (("keys", past.keys, new[0]), ("values", past.values, new[1])):
            if self._plan.state_write == "slice":
                layers, heads, tokens, size = rows.shape
                slot = given["slot"]
                end = mb.add(x=slot, y=_ints([tokens]))
                zeros, sizes = _ints([0, 0]), _ints([layers, heads])
                begin = mb.concat(values=[zeros, slot, _ints([0])], axis=0)
                end = mb.concat(values=[sizes, end, _ints([size])], axis=0)
                updated = mb.slice_update(x=old, update=rows, begin=begin, end=end)
            else:
                placed = mb.matmul(x=given["scatter"], y=rows)
                updated = mb.add(x=mb.mul(x=old, y=given["keep"]), y=placed)
            mb.coreml_update_state(state=given[name], value=updated)

    def _head(self, x: Var) -> list[Var]:
        source = self._source
        x = rms_norm(x, *source.norm("model.norm"), "final_norm")
        rows = source.head_size
        step = -(-rows // -(-rows // HEAD_ROWS))
        parts: list[tuple[Var, ...]] = []
        for number, first in enumerate(range(0, rows, step)):
            part = source.head().rows(slice(first, min(first + step, rows)))
            logits = dense(x, part, None, f"logits{number}")
            width = min(self._plan.width, logits.shape[1])
            parts.append(best_tokens(logits, width, first))
        names = ("values", "columns", "peaks", "sums")
        return [
            mb.concat(values=list(column), axis=1, name=f"top_{name}")
            for name, column in zip(names, zip(*parts, strict=True), strict=True)
        ]


class _Layer:
    """One decoder layer; `_dense` and `norm` name its values."""

    def __init__(self, source: Source, index: int, tokens: int) -> None:
        self._source = source
        self._path = f"model.layers.{index}"
        self._prefix = f"l{index}"
        self._tokens = tokens

    def _dense(self, x: Var, layer: str, name: str, scale: float = 1.0) -> Var:
        path = f"{self._path}.{layer}"
        bias = self._source.bias(path)
        scaled_bias = bias * scale if bias is not None else None
        return dense(x, self._source.weight(path, scale), scaled_bias, f"{self._prefix}_{name}")

    def norm(self, x: Var, layer: str, name: str) -> Var:
        """Build one of the layer's norms."""
        return rms_norm(x, *self._source.norm(f"{self._path}.{layer}"), f"{self._prefix}_{name}")

    def _heads(self, x: Var, heads: int, norm: str) -> Var:
        """Reshape [1, heads * head_dim, 1, tokens] to [heads, head_dim, 1, tokens]; normalise."""
        size = self._source.architecture.head_dim
        x = mb.reshape(x=x, shape=[heads, size, 1, self._tokens])
        layer = f"self_attn.{norm}"
        known = f"{self._path}.{layer}.weight" in self._source
        return self.norm(x, layer, norm) if known else x

    def key_value(self, h: Var, cos: Var, sin: Var) -> tuple[Var, Var]:
        """Return the new keys, rotated, and values: [1, kv_heads, tokens, head_dim] each."""
        heads = self._source.architecture.kv_heads
        key = self._heads(self._dense(h, "self_attn.k_proj", "k"), heads, "k_norm")
        value = self._heads(self._dense(h, "self_attn.v_proj", "v"), heads, "no_norm")
        return by_head(rotate(key, cos, sin)), by_head(value)

    def queries(self, h: Var, cos: Var, sin: Var) -> Var:
        """Return [1, kv_heads, group * tokens, head_dim], scaled for the softmax."""
        model = self._source.architecture
        scale = model.score_scale
        # A power of two costs no precision inside the weights; a norm would undo it there.
        normed = f"{self._path}.self_attn.q_norm.weight" in self._source
        folded = float(np.log2(scale)).is_integer() and not normed
        x = self._dense(h, "self_attn.q_proj", "q", scale if folded else 1.0)
        x = by_head(rotate(self._heads(x, model.heads, "q_norm"), cos, sin))
        if not folded:
            x = mb.mul(x=x, y=np.float16(scale))
        return mb.reshape(x=x, shape=[1, model.kv_heads, model.group * self._tokens, -1])

    def close(self, x: Var, attended: Var) -> Var:
        """Build the output projection, the MLP, and both residual sums."""
        model = self._source.architecture
        shape = [1, model.heads, self._tokens, model.head_dim]
        heads = mb.transpose(x=mb.reshape(x=attended, shape=shape), perm=[0, 1, 3, 2])
        flat = mb.reshape(x=heads, shape=[1, model.heads * model.head_dim, 1, self._tokens])
        added = self._dense(flat, "self_attn.o_proj", "o")
        before = "post_attention_layernorm"
        if model.is_gemma:
            added = self.norm(added, before, "attended_norm")
            before = "pre_feedforward_layernorm"
        x = mb.add(x=x, y=added)
        h = self.norm(x, before, "mlp_norm")
        gate = self._dense(h, "mlp.gate_proj", "gate")
        gate = mb.gelu(x=gate, mode="TANH_APPROXIMATION") if model.is_gemma else mb.silu(x=gate)
        up = self._dense(h, "mlp.up_proj", "up")
        down = self._dense(mb.mul(x=gate, y=up), "mlp.down_proj", "down")
        if model.is_gemma:
            down = self.norm(down, "post_feedforward_layernorm", "mlp_out_norm")
        return mb.add(x=x, y=down, name=f"{self._prefix}_out")
