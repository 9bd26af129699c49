"""A head and a real verifier: what the target sends is what the formats say it is.

The expectations come from the target's layers run by hand and the numpy reference; so these
tests fail if a layer, a norm or a position is off by one anywhere between the two processes.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from protocol.messages import (
    Features,
    FromService,
    OpenSequence,
    ReadTarget,
    Sampling,
    Tokens,
    VerificationOutcome,
    Verify,
)
from services.drafter.backends.head.loading import load_head
from services.mlx.loader import load
from services.runtime.inbox import Work
from services.verifier.verifier import Verifier
from tests.support.head_reference import Array, BlockReference, Eagle3Reference, MtpReference
from tests.support.reference import drafts
from tests.support.tiny_models import vocabulary_size, write_tiny_model
from tests.support.write_heads import WIDTH, dflash, eagle3, mtp, write_head

PROMPT = [0, 2, 97, 41, 250, 33, 8, 141, 77, 19]
LAYERS = 8
CASES = ("eagle3", "default layers", "joint", "fc_norm", "mtp", "dflash2")


class Setting:
    """A target, a head, and its reference."""

    def __init__(self, base: Path, name: str) -> None:
        family = "qwen3_5" if name == "mtp" else "llama"
        self.name = name
        self.target = write_tiny_model(base / "t", family, layers=LAYERS)
        self.model = load(self.target).module
        text: Any = getattr(self.model, "language_model", self.model)
        self.inner = text.model
        embedding = np.array(text.model.embed_tokens.weight).astype(np.float64)
        self.reference: Any
        if name == "mtp":
            config = json.loads((self.target / "config.json").read_text("utf-8"))
            tensors = mtp()
            self.reference = MtpReference(tensors, config["text_config"], embedding)
        elif name == "dflash2":
            config, tensors = dflash(
                vocabulary_size(), name, layers=[0, 4], count=LAYERS, is_causal=False
            )
            self.reference = BlockReference(tensors, config, embedding)
        else:
            more = {"joint": {"norm_before_fc": True}, "fc_norm": {"fc_norm": True}}.get(name, {})
            layers = [] if name == "default layers" else [2, 3, 6]
            config, tensors = eagle3(vocabulary_size(), layers=layers, trimmed=90, **more)
            self.reference = Eagle3Reference(tensors, config, embedding)
        self.head = write_head(base / "h", config, tensors)

    def outputs(self, tokens: Tokens) -> list[Array]:
        """[tokens, width] what each layer returns, run one after the other."""
        x = self.inner.embed_tokens(mx.array([tokens]))
        found = []
        for layer in self.inner.layers:
            mask = None if getattr(layer, "is_linear", False) else "causal"
            x = layer(x, mask, None)
            found.append(np.array(x[0].astype(mx.float32)).astype(np.float64))
        found.append(np.array(self.inner.norm(x)[0].astype(mx.float32)).astype(np.float64))
        return found

    def states(self, tokens: Tokens) -> list[list[Array]]:
        """Per position what the head reads of it."""
        outputs = self.outputs(tokens)
        read = {
            "mtp": [LAYERS],  # after the final norm
            "dflash2": [0, 4],
            # Entering layers 2, L // 2 and L - 3 is leaving those before.
            "default layers": [1, LAYERS // 2 - 1, LAYERS - 4],
        }.get(self.name, [1, 2, 5])
        return [[outputs[layer][p] for layer in read] for p in range(len(tokens))]

    def best(self, tokens: Tokens, states: list[list[Array]]) -> int:
        """The token that the reference would draft next, given the states at the first ones."""
        if self.name == "dflash2":
            at = len(states)
            hidden = self.reference.hidden(tokens[at:], at, dict(enumerate(states)))
            return int(np.argmax(self.reference.scores(hidden[len(tokens) - at], tokens[-1])))
        seen: list[tuple[Array, Array]] = []
        state, logits = np.zeros(WIDTH), np.zeros(0)
        for position in range(len(tokens) - 1):
            if position < len(states):
                state = self.reference.fuse(states[position])
            logits, state = self.reference.row(tokens[position + 1], state, position, seen)
        return int(np.argmax(logits))


@pytest.fixture(scope="module", params=CASES)
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(tmp_path_factory.mktemp("s"), request.param)


def answers(verifier: Verifier, message: Work) -> list[FromService]:
    return [answer for answer in verifier.handle(message) if answer is not None]


def hand_on(sent: list[FromService], backend: Any) -> None:
    """What the orchestrator and the drafter do with features."""
    dtype = backend.identity.features.dtype
    for message in sent:
        if isinstance(message, Features):
            rows = np.frombuffer(message.data, dtype).reshape(message.count, -1)
            backend.read(message.sequence, message.first, rows)


def drafted(backend: Any, pending: int, count: int) -> Tokens:
    return [one.token for one in drafts(backend.draft(1, pending, count))]


@pytest.mark.parametrize("beside_target", [True, False], ids=["projected", "whole"])
def test_drafts_are_those_of_the_reference(setting: Setting, *, beside_target: bool) -> None:
    """After the prompt, and after a verification that accepted some of its chain."""
    backend: Any = load_head(setting.head, setting.target, 4, beside_target=beside_target)
    request = backend.identity.features
    assert bool(request.projection) == (beside_target and setting.name != "mtp")
    verifier = Verifier(load(setting.target), 4)
    answers(verifier, ReadTarget(features=request))
    message = OpenSequence(sequence=1, tokens=PROMPT, sampling=Sampling())
    for _ in backend.open(1, PROMPT, Sampling()):
        pass
    hand_on(answers(verifier, message), backend)
    logits = np.array(setting.model(mx.array([PROMPT]))[0].astype(mx.float32))
    pending = int(np.argmax(logits[-1]))
    assert drafted(backend, pending, 1) == [
        setting.best([*PROMPT, pending], setting.states(PROMPT))
    ]
    # The target's own next token, then one that it is unlikely to accept.
    tokens = [*PROMPT, pending]
    following = int(np.argmax(np.array(setting.model(mx.array([tokens]))[0, -1])))
    verify = Verify(
        sequence=1, round=1, position=len(PROMPT), nodes=[pending, following, (following + 1) % 90]
    )
    *sent, outcome = answers(verifier, verify)
    assert isinstance(outcome, VerificationOutcome)
    kept = verify.nodes[: outcome.accepted + 1]
    assert outcome.accepted >= 1
    hand_on(sent, backend)
    backend.commit(1, len(PROMPT), kept)
    tokens = [*PROMPT, *kept, outcome.bonus]
    states = setting.states(tokens[:-1])
    for token in drafted(backend, outcome.bonus, 3):
        assert token == setting.best(tokens, states)
        if setting.name == "dflash2":
            break  # its further tokens come from the same pass
        tokens.append(token)
