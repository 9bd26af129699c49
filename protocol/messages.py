"""All messages, typed. One union per direction; each docstring names the sender and the answer.

A message travels as one msgpack map whose `type` is the struct's tag. Unknown fields are rejected
(`codec.py`). Every message about a round carries (sequence, round), so that a stale one can be
recognised and dropped. Tokens are ids of the *target's* vocabulary.
"""

from typing import Annotated, Any, Literal

import msgspec

PROTOCOL_VERSION = 4

Role = Literal["verifier", "drafter"]
Mode = Literal["ar", "sd", "ssd"]
Acceptance = Literal["coupled", "rejection"]
Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
MAX_TOKENS = 2**20
"""Longest list of tokens in a message: more than any model's context."""
MAX_BRANCHES = 4096
"""Most branches of a draft tree, and most tokens of a draft distribution."""
MAX_PREPARED = 256
"""Most branches that a drafter is asked to prepare in a round (B)."""
MAX_ITEMS = 4096
"""Most turns of a conversation, stop strings, or other items of a list in a request."""

MAX_ERROR = 4096
"""Longest error of a service, in characters."""
MAX_GRAMMAR_CHARACTERS = 128 * 1024
"""Longest grammar: the models compile it inline with other work."""

MAX_DEPTH = 256
"""Deepest tree, and longest draft."""
MAX_NODES = 64
"""Most draft tokens of a verified tree."""
MAX_SIBLINGS = 15
"""Most alternatives of a drafter to its best candidate."""

Milliseconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
Tokens = Annotated[list[Token], msgspec.Meta(max_length=MAX_TOKENS)]

Name = Annotated[str, msgspec.Meta(max_length=4096)]
"""The name of a model, a backend or a device; a model's may be a path."""

Parents = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=MAX_BRANCHES)]
"""Parent index of each token of a tree, except the first ones; see its uses."""

END_OF_BRANCH = -1
"""Marks a branch in `DraftTree.tokens` that has no further token."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of all messages: immutable, tagged, strict."""


class LogitsOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Processing of a request's logits before sampling, implemented in `logits_processor.py`."""

    logit_bias: Annotated[
        tuple[tuple[Token, Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)]], ...],
        msgspec.Meta(max_length=MAX_ITEMS),
    ] = ()
    """Added to the logits of these tokens."""
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.1, le=10.0)] = 1.0
    """Divides positive logits of tokens of the prompt and the answer, multiplies the others."""
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] = 0.0
    """Subtracted from the logits of the answer's tokens."""
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] = 0.0
    """Subtracted from the logits of the answer's tokens, once per occurrence."""
    grammar: Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR_CHARACTERS)] = ""
    """Grammar of the answer, in llguidance's Lark dialect; empty: unconstrained."""
    answer_from: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Position of the answer's first token. Filled in by the orchestrator, like the next fields."""
    answer_until: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Length of the sequence at which the answer is cut off; 0: unlimited. A grammar ends before
    that if it can.
    """
    stop_ids: Annotated[tuple[Token, ...], msgspec.Meta(max_length=MAX_ITEMS)] = ()
    """Tokens that may end an answer where its grammar allows an end."""


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling parameters; temperature 0 is greedy. `sampling_params.py` checks combinations.

    Under the coupled rule (`sampler.py`) the output is a function of (model, prompt, Sampling)
    alone; under the rejection rule (`rejection.py`) its distribution is.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] = 0.0
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    min_p: Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)] = 0.0
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    acceptance: Acceptance = "coupled"
    draft_temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] | None = None
    """Temperature of the drafter; None: the target's. It affects proposals, not the output."""
    draft_top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = None
    """Top-p of the drafter; None: the target's."""
    saguaro: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 1.0
    """Rejection rule: the drafter's weight (C) for tokens whose outcomes are prepared; 1 is off."""
    logits_options: LogitsOptions | None = None
    """Bias, penalties, grammar; both models apply them identically."""
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    """Report the target's log-probability of each token, and of this many best ones."""


class DraftDistribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The distribution that a draft token was sampled from (q): tokens and their probabilities.

    Without tokens: the draft token was proposed deterministically (q is one).
    """

    tokens: Annotated[list[Token], msgspec.Meta(max_length=MAX_BRANCHES)] = []
    probabilities: Annotated[
        list[Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]], msgspec.Meta(max_length=MAX_BRANCHES)
    ] = []


# ---------------------------------------------------------------- handshake, all services


class RankStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One process of a verifier that is a group of ranks."""

    rank: int
    host: str
    pid: int
    """Process id on its machine."""
    weight_bytes: int
    """Size of its part of the model."""
    latency_ms: float
    """Latency of a small array to the next rank; measured when the group was formed."""
    mbytes_per_s: float
    """Throughput of a large array to the next rank."""
    part: str = ""
    """Its layers, for users: 0-11, or 1/2 of all."""
    free_bytes: int = 0
    """Free memory after loading; on a machine with several ranks, its share."""
    pass_ms: float = 0.0
    """Time of a pass of one token over all ranks, exchanges included; 0: without a model."""
    read_bytes_s: float = 0.0
    """Rate at which it reads weights; 0: not measured."""


class FeatureRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The target's features for a drafter: hidden states of some layers, per committed token.

    The layers' outputs are concatenated.
    """

    layers: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=64)]
    """Layer numbers, from 0."""
    normalization: Literal["layer", "joint", "final", "none"] = "layer"
    """Normalization of the outputs. layer, joint: each, or all together, are divided by their
    root mean square. final: the target's final norm is applied.
    """
    projection: str = ""
    """A safetensors file whose `fc.weight` the verifier applies; empty: none."""
    dtype: Literal["float16", "float32"] = "float16"
    window: Annotated[int, msgspec.Meta(ge=1)] = 4096
    """Number of a sequence's last positions worth keeping."""


_MillisecondsByRows = Annotated[
    dict[
        Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)],
        Annotated[float, msgspec.Meta(gt=0.0, le=1e9)],
    ],
    msgspec.Meta(max_length=64),
]


class PassTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Milliseconds of a service's passes by their tokens, measured between requests."""

    chains: _MillisecondsByRows = {}
    """Verifier: while the drafter is idle. Drafter: of a token drafted while the target waits."""
    contended: _MillisecondsByRows = {}
    """Verifier: chains without the cores of the drafter, which it uses otherwise."""


class PreparationState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How far a service's trials, timings and traces are: stages that run between requests."""

    done: int = 0
    total: int = 0
    stage: str = ""
    """The next or present one; empty once all are done."""

    @property
    def is_complete(self) -> bool:
        """True if the service has reached its speed."""
        return self.done >= self.total


class Hello(Message, frozen=True, tag="hello", kw_only=True, omit_defaults=True):
    """Service -> orchestrator: the first message on a connection. Answer: Welcome or Rejected."""

    protocol: int
    role: Role
    pid: int
    backend: Name
    model: Name
    tokenizer_fingerprint: Name
    """Hash of the token -> id map; empty for a backend that has no model."""
    vocabulary_size: int
    """Tokens in that map (not the padded height of the head); 0 without a model."""
    context_length: int
    """Tokens the model can attend to; 0 means unlimited."""
    compute_unit: Name
    max_draft_tokens: int
    """Verifier: longest draft it can roll back (0: it decodes plainly). Drafter: deepest tree."""
    kv_tokens: int = 0
    """Verifier: total KV capacity in tokens for all open sequences; 0 means unlimited."""
    kv_limit: Name = ""
    """Verifier: the reason for `kv_tokens`, for users."""
    rewinding: Name = ""
    """Verifier: the kinds of its model's layers, and how they roll back a rejected draft."""
    weight_bytes: int = 0
    """Verifier: bytes of weights that a pass over few tokens reads; 0: unknown."""
    started_ns: int = 0
    """Start time of its process, by the machine's monotonic clock; 0 means unknown."""
    ranks: list[RankStatus] = []
    """Verifier: the processes that share the model; empty for a single one."""
    pass_times: PassTimes = PassTimes()
    """Initial estimates for the planner; empty: not measured yet."""
    preparation: PreparationState = PreparationState()
    """The stages that follow, unless there are none."""
    features: FeatureRequest | None = None
    """Drafter: the target features that it reads; None if it reads none."""
    takes_trees: bool = False
    """Verifier: accepts trees in `Verify`. Drafter: accepts trees in `Prepare`, and answers with
    trees if siblings are requested.
    """


class Prepared(Message, frozen=True, tag="prepared", kw_only=True):
    """Service -> orchestrator: a stage of the preparation has ended. No answer.

    The fields replace those of `Hello`.
    """

    preparation: PreparationState
    pass_times: PassTimes = PassTimes()
    takes_trees: bool = False


class Welcome(Message, frozen=True, tag="welcome"):
    """Orchestrator -> service: the handshake is complete."""


RejectedKind = Literal["invalid", "busy", "unavailable"]
"""Cause of the rejection: the request itself, other requests, or the stack's state."""


class Rejected(Message, frozen=True, tag="rejected"):
    """Orchestrator -> service or client: the message is rejected, for this reason."""

    reason: str
    kind: RejectedKind = "invalid"
    request: int = 0
    """The client's rejected request; 0 if the message was not a request."""


class Stop(Message, frozen=True, tag="stop"):
    """Orchestrator -> service: finish now, exit with code 0. No answer."""


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Service -> orchestrator: the working thread is alive. Answer: Heartbeat.

    Sent when nothing else was sent for a second. `sequence` is the one in progress, 0 while the
    service waits for work; the orchestrator's answer repeats it.
    """

    sequence: int = 0
    busy_s: Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)] = 0.0
    """How long the call that begins now may take, where that is long: silence until then is no
    hang."""


class Identify(Message, frozen=True, tag="identify"):
    """Orchestrator -> service: you are unknown (a restart?); say Hello. Answer: Hello.

    Open sequences are forgotten on both sides.
    """


class Failed(Message, frozen=True, tag="failed", kw_only=True):
    """Service -> orchestrator: the sequence failed; the process continues."""

    sequence: int
    error: Annotated[str, msgspec.Meta(max_length=MAX_ERROR)]
    detail: Annotated[str, msgspec.Meta(max_length=MAX_ERROR)] = ""


# ---------------------------------------------------------------- sequences, both services


class OpenSequence(Message, frozen=True, tag="open", kw_only=True):
    """Orchestrator -> service: prefill these tokens into a KV. Answer: Prefilled or Failed.

    `tokens` excludes the pending token. Opening an open sequence replaces it.
    """

    sequence: int
    tokens: Tokens
    sampling: Sampling


class Prefilled(Message, frozen=True, tag="prefilled", kw_only=True):
    """Service -> orchestrator: the sequence is open and holds `length` tokens."""

    sequence: int
    length: int
    prefill_ms: Milliseconds
    cached: int = 0
    """Number of them that were not computed, because the KV of another sequence had them."""
    at_ns: int = 0
    """When it was sent, on the sender's monotonic clock; 0 if unknown."""


class PrefillProgress(Message, frozen=True, tag="prefilling", kw_only=True):
    """Verifier -> orchestrator: the sequence holds `length` tokens so far. No answer.

    Sent periodically during a long prefill.
    """

    sequence: int
    length: Annotated[int, msgspec.Meta(ge=0)]
    cached: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Number of them that were not computed, as in `Prefilled`."""


class CloseSequence(Message, frozen=True, tag="close", kw_only=True):
    """Orchestrator -> service: the sequence has ended. No answer.

    The service may keep its KV, within its own limits, for a sequence with the same prefix.
    """

    sequence: int


class Features(Message, frozen=True, tag="features", kw_only=True):
    """Verifier -> orchestrator -> drafter: the target's states at `count` committed tokens.

    Sent before the `Prefilled` or `VerificationOutcome` that commits these tokens, and again for a
    drafter that joined later. No answer.
    """

    sequence: int
    first: Annotated[int, msgspec.Meta(ge=0)]
    """Position of the first token."""
    count: Annotated[int, msgspec.Meta(ge=1)]
    data: bytes
    """[count, width] numbers of `FeatureRequest.dtype`, little-endian."""
    request: Annotated[int, msgspec.Meta(ge=0)] = 0
    """`ReadTarget.number`: features requested for another drafter are not for this one."""


# ---------------------------------------------------------------- verifier


class ReadTarget(Message, frozen=True, tag="read", kw_only=True):
    """Orchestrator -> verifier: send these features from now on, starting with existing ones.

    Without `features`: stop sending any. Answer: Failed of sequence 0 if that is impossible.
    """

    features: FeatureRequest | None = None
    number: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Increases with every message."""
    sequence: Literal[0] = 0
    """Always 0: the message concerns all sequences."""


class Verify(Message, frozen=True, tag="verify", kw_only=True, omit_defaults=True):
    """Orchestrator -> verifier: verify a tree of draft tokens. Answer: VerificationOutcome.

    nodes[0] is the pending token and `position` its position; the KV holds exactly the tokens
    before it, which the verifier checks. nodes[i] follows nodes[parents[i - 1]], an earlier one;
    without parents each follows the previous one: a chain. Siblings differ
    (`protocol.decoding.token_tree`).
    """

    sequence: int
    round: int
    position: int
    nodes: Tokens
    parents: Parents = []
    distributions: Annotated[list[DraftDistribution], msgspec.Meta(max_length=MAX_BRANCHES)] = []
    """Distributions of nodes[1:] under the rejection rule, which applies to chains only; empty
    if they were not sampled.
    """
    granted: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Number of free-running tokens that may follow the outcome. Each comes from a pass over the
    previous token alone, as if requested by a `Verify`: with an outcome of its own, in
    consecutive rounds.
    """
    stop_ids: Tokens = []
    """Tokens that end the free run."""
    drafter_idle: bool = False
    """True if no draft is prepared meanwhile, so that the drafter's cores are free."""


class Revoke(Message, frozen=True, tag="revoke", kw_only=True):
    """Orchestrator -> verifier: end the free run after the token already announced.

    The outcome announced last says that none follows. A verifier that has ended the run by itself
    has reported so, and does nothing.
    """

    sequence: int
    round: int
    """Round of the `Verify` that granted the run."""


class Extend(Message, frozen=True, tag="extend", kw_only=True):
    """Orchestrator -> verifier: grant more free-running tokens than its `Verify` did.

    Sent long before the run ends, so that the verifier need not pause. A verifier that has ended
    the run by itself has reported so, and does nothing.
    """

    sequence: int
    round: int
    """Round of that `Verify`."""
    granted: Annotated[int, msgspec.Meta(ge=1)]
    """Number of additional tokens."""


class TokenLogprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The target's log-probability of an emitted token, and of the most likely ones."""

    chosen: float
    best: list[tuple[Token, float]]


class VerificationOutcome(Message, frozen=True, tag="outcome", kw_only=True, omit_defaults=True):
    """Verifier -> orchestrator: `accepted` draft tokens, followed by `bonus`."""

    sequence: int
    round: int
    accepted: Annotated[int, msgspec.Meta(ge=0)]
    bonus: Token
    goes_on: bool = False
    """True if the next token follows by itself (`Verify.granted`)."""
    node: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """For a tree: the index of the last accepted token, `accepted` steps from the first."""
    verify_ms: float
    idle_ms: float
    """Time the verifier waited between its last answers and this forward pass."""
    sequences: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Number of sequences verified in this pass."""
    logprobs: list[TokenLogprobs] = []
    """For the accepted tokens and the bonus token, if the request has `logprobs`."""
    rows: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Tokens of all their trees; 0 means this tree's only."""
    at_ns: int = 0
    """When it was sent, on the sender's monotonic clock; 0 if unknown."""

    @property
    def row(self) -> int:
        """The index of the last accepted token, of a tree or a chain."""
        return self.accepted if self.node is None else self.node


# ---------------------------------------------------------------- drafter


class Prepare(Message, frozen=True, tag="prepare", kw_only=True, omit_defaults=True):
    """Orchestrator -> drafter: prepare branches for the outcomes of a verification.

    `tokens` are the committed tokens from position `base` on, so that a drafter can first rewind to
    `base`. The verified tree follows them, `nodes` and `parents` as in `Verify`. `fan_out[i]` is
    the number of bonus tokens to prepare after nodes[i], none of them a child of it, each continued
    for up to `depth` tokens. Answer: a stream of DraftTree, one per depth, until done or until a
    newer message arrives.
    """

    sequence: int
    round: int
    base: Annotated[int, msgspec.Meta(ge=0)]
    tokens: Tokens
    nodes: Tokens
    fan_out: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=MAX_BRANCHES)
    ]
    depth: Annotated[int, msgspec.Meta(ge=0)]
    parents: Parents = []
    held_back: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Number of the best tokens that Saguaro sampling holds back (F)."""
    siblings: Annotated[int, msgspec.Meta(ge=0, le=MAX_SIBLINGS)] = 0
    """Number of alternatives requested for each draft token. They cost the drafter no forward
    pass.
    """


class DraftNow(Message, frozen=True, tag="draft", kw_only=True, omit_defaults=True):
    """Orchestrator -> drafter: the target waits; draft `count` tokens after `pending` at once.

    Answer: DraftTree with the single branch (accepted, pending), one per depth. With a count of 0
    there is no answer: it cancels a draft that is no longer awaited, or has the drafter process
    tokens before a draft is requested.
    """

    sequence: int
    round: int
    base: Annotated[int, msgspec.Meta(ge=0)]
    tokens: Tokens
    pending: Token
    accepted: Annotated[int, msgspec.Meta(ge=0)]
    count: Annotated[int, msgspec.Meta(ge=0)]
    held_back: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The fields of `Prepare`."""
    siblings: Annotated[int, msgspec.Meta(ge=0, le=MAX_SIBLINGS)] = 0


class DraftTree(Message, frozen=True, tag="tree", kw_only=True, omit_defaults=True):
    """Drafter -> orchestrator: one depth of every branch prepared in `round`.

    Depth 1 carries `outcomes`, a pair (index of the last accepted node, bonus token) per branch,
    which later depths leave empty; in a chain that index is the number of accepted tokens. Without
    `parents`, tokens[b] is the depth-th draft token of branch b, or END_OF_BRANCH. With them,
    tokens[b] follows token parents[b] of the previous depth, at depth 1 outcome parents[b];
    siblings are in falling order of likelihood. `last` says that no deeper message of this round
    follows.
    """

    sequence: int
    round: int
    depth: Annotated[int, msgspec.Meta(ge=1, le=MAX_DEPTH)]
    outcomes: Annotated[list[tuple[int, Token]], msgspec.Meta(max_length=MAX_BRANCHES)] = []
    tokens: Annotated[
        list[Annotated[int, msgspec.Meta(ge=END_OF_BRANCH, lt=2**31)]],
        msgspec.Meta(max_length=MAX_BRANCHES),
    ]
    parents: Parents = []
    confidences: Annotated[
        list[Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]], msgspec.Meta(max_length=MAX_BRANCHES)
    ]
    """Confidence of the drafter in each token: the token's probability, 0 to 1."""
    distributions: Annotated[list[DraftDistribution], msgspec.Meta(max_length=MAX_BRANCHES)] = []
    """Distribution that each branch's token was sampled from; empty if none was sampled."""
    draft_ms: Milliseconds
    """Time the drafter worked for this message."""
    last: bool = False
    at_ns: int = 0
    """When it was sent, on the sender's monotonic clock; 0 if unknown."""


Greeting = Welcome | Rejected | Identify | Heartbeat | Stop
ToDrafter = OpenSequence | Prepare | DraftNow | CloseSequence | Features | Greeting
FromDrafter = Hello | Prefilled | DraftTree | Failed | Heartbeat
FromDraftServer = FromDrafter | Rejected  # over a network the peer may be busy
ToVerifier = OpenSequence | Verify | Revoke | Extend | CloseSequence | ReadTarget | Greeting


ToService = (
    OpenSequence
    | Prepare
    | DraftNow
    | Verify
    | Revoke
    | Extend
    | CloseSequence
    | ReadTarget
    | Features
    | Greeting
)
FromService = (
    Hello
    | Prepared
    | Prefilled
    | PrefillProgress
    | DraftTree
    | VerificationOutcome
    | Features
    | Failed
    | Heartbeat
)


# ---------------------------------------------------------------- clients of the orchestrator


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn of a conversation, in the format of chat templates."""

    role: str
    content: str
    name: str = ""
    tool_calls: list[dict[str, Any]] = []
    """Calls of the assistant: {type, id, function: {name, arguments}}, arguments as a map."""
    tool_call_id: str = ""
    """The call that this tool's message answers."""
    reasoning_content: str = ""
    """The assistant's reasoning before its answer; templates decide how to use it."""


class Generate(Message, frozen=True, tag="generate", kw_only=True):
    """Client -> orchestrator: answer this. Answers: Text (many), then Finished; or Rejected.

    Exactly one of `messages` (rendered by the chat template), `text` (as it is) and `tokens`
    is given.
    """

    request: int
    messages: Annotated[list[ChatMessage], msgspec.Meta(max_length=MAX_ITEMS)] = []
    text: str = ""
    tokens: Tokens = []
    tools: list[dict[str, Any]] = []
    """Functions that the model may call, in the format of its chat template."""
    template_options: dict[str, Any] = {}
    """Further variables of the chat template, such as enable_thinking."""
    sampling: Sampling = Sampling()
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 256
    stop: Annotated[list[str], msgspec.Meta(max_length=MAX_ITEMS)] = []
    mode: Mode = "ssd"
    num_draft_tokens: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """Draft tokens per round; 0: the planner decides."""
    max_draft_tokens: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """Limit on the planner's draft tokens per round; 0 is unlimited."""
    branches: Annotated[int, msgspec.Meta(ge=0, le=MAX_PREPARED)] = 0
    """Branches prepared per round (B); 0: the orchestrator decides."""
    tree_nodes: Annotated[int, msgspec.Meta(ge=0, le=MAX_NODES)] = 0
    """Draft tokens of verified trees; 0 and 1: chains."""
    trace: bool = False
    """Include the timeline in `Finished`."""
    answer_tokens: Tokens = []
    """Beginning of the answer as tokens, which the client has already."""
    answer_start: str = ""
    """Beginning of the answer as text, after `answer_tokens`."""
    special_text: bool = False
    """Output special tokens, except stop tokens, as text: some models mark reasoning or tool
    calls by them.
    """
    client: str = ""
    """Client with which this request shares its places; empty: the connection is the client."""
    group: int = 0
    """Group of all answers to one request of that client; 0: there is only this one."""
    is_background: bool = False
    """Let other requests go first: no user waits for the answer."""
    count_only: bool = False
    """Only tokenise the prompt: Finished comes at once, with its tokens and without an answer."""
    progress: bool = False
    """Send `Progress` during the prefill."""


class Cancel(Message, frozen=True, tag="cancel", kw_only=True):
    """Client -> orchestrator: stop this request; Finished("cancelled") follows."""

    request: int


Origin = Literal["target", "hit", "miss", "lookup"]
"""Origin of an emitted token: the target, or an accepted draft token of a chain that was
prepared in time (hit), drafted while the target waited (miss), or found by prompt lookup
(lookup).
"""
TokenOrigin = Literal["target", "hit", "miss", "lookup", "branch"]
"""Origins including accepted draft tokens that only a tree offered, as siblings of the likely
chain.
"""


class ShownToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token as shown to clients, with the target's log-probability of it."""

    text: str
    data: list[Annotated[int, msgspec.Meta(ge=0, le=255)]]
    """Its bytes: the text may be a part of a character."""
    logprob: float


class Logprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One emitted token, and the most likely ones at its position."""

    chosen: ShownToken
    best: list[ShownToken]


class Text(Message, frozen=True, tag="text", kw_only=True):
    """Orchestrator -> client: new tokens, and the text that became final with each.

    Text that was held back until the end comes as a last piece without a token.
    """

    request: int
    tokens: Tokens
    origins: list[TokenOrigin]
    pieces: list[str]
    logprobs: list[Logprobs] = []
    """One per token, if requested; sent once all of the token's text is final."""

    @property
    def text(self) -> str:
        """The concatenated pieces."""
        return "".join(self.pieces)


class Progress(Message, frozen=True, tag="progress", kw_only=True):
    """Orchestrator -> client, if requested: how much of the prompt is computed.

    Sent periodically during a long prefill, and once at its end.
    """

    request: int
    prompt_tokens: int
    computed: int
    """Tokens computed, or taken from the KV of earlier requests."""
    cached: int = 0
    """Number of tokens from that KV."""


class RoundStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Totals of the rounds whose chain had one origin, without a request's first round."""

    rounds: int = 0
    accepted: int = 0
    """Accepted draft tokens of these rounds that belong to the answer."""
    drafted: int = 0
    """Draft tokens verified by these rounds."""
    verify_ms: float = 0.0
    cache_lookups: int = 0
    """Rounds during which a drafter prepared outcomes: each ends with a lookup in the
    speculation cache.
    """
    cache_hits: int = 0
    """Number of these that ended in a prepared outcome."""


Way = Literal["plain", "in turn", "in parallel"]


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a drafter works, the expected gain, and what that follows from."""

    way: Way
    """Plain decoding; drafts while the target waits; or drafts while it verifies."""
    draft_tokens: int = 0
    """Per round."""
    gain: float = 1.0
    """Speed over plain decoding."""
    pass_ms: dict[int, float] = {}
    """T_v by rows while the drafter is idle."""
    draft_ms: float = 0.0
    """T_d, of one token."""
    acceptance: float = 0.0
    """Probability that a draft token is accepted."""


class Statistics(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Statistics of one request. Definitions: docs/guide/statistics.md; times in the named unit."""

    ttft_ms: float
    decode_s: float
    tok_s: float
    """Decoded tokens per second, without prefill and the first token."""
    rounds: int
    drafted: int
    accepted: int
    acceptance_rate: float
    mean_acceptance_length: float
    per_position: list[float]
    offered_per_position: list[int] = []
    """Rounds that offered a draft token at each position, and below those that accepted it."""
    accepted_per_position: list[int] = []
    cache_hits: int
    cache_misses: int
    hit_rate: float
    fallbacks: dict[str, int]
    overlap_ratio: float
    phase_ms: dict[str, float]
    """Medians per round: verify, idle (verifier waiting) after a hit and otherwise, dispatch
    (outcome in -> next Verify out) on a hit, draft_wait (waiting for a draft after a miss)."""
    drafter_restarts: int
    verifier_restarts: int
    plain_rounds: int
    """Rounds without speculation because plain decoding was faster, or was being measured."""
    stale_trees: int = 0
    """Messages of the drafter that were dropped: late, duplicate, or out of order."""
    plain_tok_s: float
    """Speed of plain decoding against which speculation was judged; 0 if it was not measured
    since the orchestrator started, too long ago, or on a machine that has become slower or
    faster since.
    """
    plain_age_s: float = 0.0
    """Time between its last measurement and the end of the answer."""
    tree_rounds: int = 0
    """Rounds that verified a tree with siblings."""
    branch_tokens: int = 0
    """Accepted draft tokens outside the most likely chain: the gain of trees."""
    drafter: str = ""
    """Backend and model that drafted, the last if there were several; empty: none."""
    state_bytes: int = 0
    """Size of the target's states that were sent to the drafter during decoding."""
    offered_by_lag: list[int] = []
    """Draft tokens by lag, from 1: the number of tokens before them that the target had not seen
    yet when they were drafted. For a prepared chain these include the previous chain.
    """
    accepted_by_lag: list[int] = []
    rewinding: str = ""
    """Rollback method (`Hello`)."""
    planned: Schedule | None = None
    """The planner's schedule before the first round; None before T_v and T_d were known."""
    by_origin: dict[Origin, RoundStats] = {}
    hits_by_rank: list[int] = []
    """Rounds whose outcome was the i-th best candidate prepared for its length."""
    draft_wait_ms: float = 0.0
    """Total time in which the target waited for a draft."""


HISTOGRAM_BOUNDS_MS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
"""Upper bounds of the histogram buckets for times of rounds; one more bucket follows."""


class TimingHistogram(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counts of times by bucket of `HISTOGRAM_BOUNDS_MS`, and their sum."""

    counts: list[int]
    sum_ms: float


FinishReason = Literal["stop", "length", "context", "cancelled", "error"]


Track = Literal["orchestrator", "verifier", "drafter"]


class TraceEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An event of a process for a request, on the machine's monotonic clock."""

    track: Track
    name: str
    start_us: float
    duration_us: float
    details: dict[str, int | str] = {}


class Finished(Message, frozen=True, tag="finished", kw_only=True):
    """Orchestrator -> client: the request has ended."""

    request: int
    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int = 0
    """Number of them that the target took from the KV of earlier requests."""
    statistics: Statistics
    histograms: dict[str, TimingHistogram] = {}
    """Times per phase of the rounds whose medians are in `statistics`."""
    stop_string: str = ""
    """The stop string that ended the answer, if one did."""
    error: str = ""
    prompt: Tokens = []
    """The prompt itself, if it was only to be counted."""
    timeline: list[TraceEvent] = []
    """Events of each process, if requested."""

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens that the target's prefill computed.

        The prompt's last token is not among them: the first verification computes it.
        """
        return max(0, self.prompt_tokens - 1 - self.cached_tokens)


class StatusRequest(Message, frozen=True, tag="status?"):
    """Client or supervisor -> orchestrator: report your state. Answer: Status."""

    request: int = 0
    """One of the client's requests, to ask if it is still served; 0 for none."""
    question: int = 0
    """The client's number of this question; the answer repeats it."""


class ServiceStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One service as the orchestrator sees it."""

    role: Role
    pid: int
    backend: str
    model: str
    compute_unit: str
    context_length: int
    weight_bytes: int = 0
    """The fields of `Hello`."""
    ranks: list[RankStatus] = []
    preparation: PreparationState = PreparationState()
    silent_s: float = 0.0
    """Time since the last sign of life of its working thread, while the orchestrator was awake."""


class WindowStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Statistics of all requests in the last `seconds`, ten at most.

    Definitions as in `Statistics`, except for `tok_s`.
    """

    seconds: float = 0.0
    busy_s: float = 0.0
    """Part of that time in which any request was running."""
    requests: int = 0
    """Number of requests that ended in it."""
    tokens: int = 0
    tok_s: float = 0.0
    """Tokens of all requests per busy second; prefill counts as busy."""
    rounds: int = 0
    plain_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    acceptance_rate: float = 0.0
    cache_hits: int = 0
    cache_misses: int = 0
    hit_rate: float = 0.0


class PlannerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The planner's plan for the next round."""

    mode: Mode = "ssd"
    speculating: bool = False
    """False: plain decoding, because it is faster, is being measured, or was requested."""
    num_draft_tokens: int = 0
    """Limit on the draft length; 0 for plain decoding."""
    branches: int = 0
    """Branches to prepare (B); 0 if none."""
    speculative_tok_s: float = 0.0
    """Speed of recent speculative rounds, per request; 0 if there were none lately."""
    plain_tok_s: float = 0.0
    """Speed of plain rounds, per request; 0 if not measured, as in `Statistics`."""
    plain_age_s: float = 0.0
    """Time since its last measurement."""


SequenceState = Literal["prefill", "verify", "draft", "stranded"]
"""Event that a sequence waits for: the prompt, a verification, a draft, or a verifier."""


class SequenceStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Statistics of one running request so far."""

    sequence: int
    state: SequenceState
    age_s: float
    """Time since the request arrived."""
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int = 0
    """Tokens of the prompt computed so far; updated periodically."""
    tokens: int
    """Tokens emitted so far."""
    tok_s: float
    acceptance_rate: float
    hit_rate: float
    planner: PlannerState


class Status(Message, frozen=True, tag="status", kw_only=True):
    """Orchestrator -> client: its state, and the services that completed the handshake."""

    pid: int
    model: str
    services: list[ServiceStatus]
    active: int
    waiting: int
    refused: dict[Role, str] = {}
    """Reason for the last rejection by role, until a service is accepted."""
    marked_for_kill: dict[int, str] = {}
    """Processes that hang or send invalid messages, by pid, with the reason: the supervisor
    kills them.
    """
    dropped: int = 0
    """Messages dropped since the start, to services and clients that were gone or did not read."""
    longest_step_ms: float = 0.0
    """Processor time of the longest step of the orchestrator's loop in the last seconds."""
    request: int = 0
    """The request of the question."""
    question: int = 0
    """The question that this answers."""
    serving: bool = False
    """True if that request is in progress or waits."""
    degraded: list[str] = []
    """Problems of the stack, in sentences; empty if all is well."""
    window: WindowStats = WindowStats()
    """Statistics of all requests in the last seconds."""
    planner: PlannerState = PlannerState()
    """The plan for a request that leaves all options to the planner."""
    sequences: list[SequenceStatus] = []
    """The running requests, the first 64 of them."""
    lookup_only: bool = False
    """True if no drafter is used: prompt lookup in the orchestrator drafts alone."""

    @property
    def is_prepared(self) -> bool:
        """True if no service has anything left to try, time or trace: speeds are comparable."""
        return all(service.preparation.is_complete for service in self.services)

    @property
    def drafter(self) -> ServiceStatus | None:
        """The drafter process, if there is one."""
        return next((service for service in self.services if service.role == "drafter"), None)

    @property
    def draft_backend(self) -> str | None:
        """The backend that drafts; None while the drafter is away."""
        if self.drafter is not None:
            return self.drafter.backend
        return "ngram" if self.lookup_only else None


class ServiceDown(Message, frozen=True, tag="down", kw_only=True):
    """Supervisor -> orchestrator: a process ended; `final` means that it will not be replaced."""

    role: Role
    pid: int
    reason: str
    final: bool
    removed: bool = False
    """True if a drafter was removed on purpose: prompt lookup drafts alone from now on."""


ToOrchestrator = Generate | Cancel | StatusRequest | ServiceDown
FromOrchestrator = Text | Progress | Finished | Rejected | Status


# ---------------------------------------------------------------- the orchestrator's helper


class EncodePrompt(Message, frozen=True, tag="encode", kw_only=True):
    """Orchestrator -> text worker: render and tokenise this. Answer: PromptTokens or Rejected.

    The fields are those of `Generate`.
    """

    messages: list[ChatMessage] = []
    text: str = ""
    tools: list[dict[str, Any]] = []
    template_options: dict[str, Any] = {}
    answer_tokens: Tokens = []
    answer_start: str = ""


class CheckGrammar(Message, frozen=True, tag="grammar", kw_only=True):
    """Orchestrator -> text worker: can the models use this? Answer: Done or Rejected."""

    grammar: str


class WorkerReady(Message, frozen=True, tag="ready"):
    """Text worker -> orchestrator: the tokenizer is loaded."""


class PromptTokens(Message, frozen=True, tag="tokens", kw_only=True):
    """Text worker -> orchestrator: the prompt."""

    tokens: Tokens


class Done(Message, frozen=True, tag="done"):
    """Supervisor -> CLI, text worker -> orchestrator: carried out, and nothing is wrong."""


ToTextWorker = EncodePrompt | CheckGrammar | Stop
FromTextWorker = WorkerReady | PromptTokens | Done | Rejected


# ---------------------------------------------------------------- supervisor's control socket


class SwapDrafter(Message, frozen=True, tag="swap", kw_only=True):
    """CLI -> supervisor: replace the drafter of the running stack. Answer: Done or Rejected."""

    backend: str
    model: str = ""
    command: list[str] = []
    """Backend stdio: the program that drafts, and its arguments."""
    lines: bool = False
    """Backend stdio: the program speaks the line protocol."""
    server: str = ""
    """Backend remote: the address of the draft server."""
    server_key: str = ""
    """Backend remote: its public key, or its name in the list of trusted keys."""


class StackRequest(Message, frozen=True, tag="stack?"):
    """CLI -> supervisor: list your processes. Answer: Stack."""


ProcessState = Literal["starting", "running", "died", "lost"]
"""`died`: a replacement is being started; `lost`: it was restarted too often."""


class ProcessStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One child of the supervisor."""

    role: str
    pid: int
    backend: str
    model: str
    state: ProcessState
    restarts: int
    note: str = ""
    """Details of the state for users: why it died, where it listens, how long it loads."""
    device: str = ""
    """The device it was started for; empty: MLX's default."""


class Stack(Message, frozen=True, tag="stack", kw_only=True):
    """Supervisor -> CLI: the processes of this stack."""

    processes: list[ProcessStatus]


ToSupervisor = SwapDrafter | StackRequest
FromSupervisor = Stack | Done | Rejected


# ---------------------------------------------------------------- several models

ModelState = Literal["unloaded", "loading", "loaded", "unloading", "failed"]
"""`failed`: it could not be loaded, or ended by itself; the next request for it tries again."""


class ModelStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of the served models."""

    name: Name
    state: ModelState
    stack: Name
    """Name of its stack while it is loaded, as in `ssd top --name`."""
    note: str = ""
    """Details of the state for users: why it failed, what it waits for."""
    memory_bytes: int = 0
    """Memory of its processes; an estimate if it is not loaded, 0 if there is none."""
    answering: int = 0
    """Number of requests that use it."""
    waiting: int = 0
    """Requests that wait for it to be loaded."""


class UseModel(Message, frozen=True, tag="use", kw_only=True):
    """Gateway -> model server: load this model if needed, and keep it until it is released.

    Each use has a separate connection. Answer: ModelReady or Rejected, when it is known.
    """

    model: Name
    drafter: Name = ""
    """One of the model's drafters; empty: the running one."""


class ReleaseModel(Message, frozen=True, tag="release"):
    """Gateway -> model server: release the model of this connection. No answer."""


class ModelReady(Message, frozen=True, tag="usable", kw_only=True):
    """Model server -> gateway: the model is loaded and stays so."""

    folder: Name
    """Folder of the target."""
    sampling: Sampling
    """Defaults of requests."""


class ModelsRequest(Message, frozen=True, tag="models?"):
    """Gateway or CLI -> model server: describe your models. Answer: Models."""


class Models(Message, frozen=True, tag="models", kw_only=True):
    """Model server -> gateway or CLI: all models, in the order of their file."""

    models: list[ModelStatus]


ToModelServer = UseModel | ReleaseModel | ModelsRequest | StackRequest | SwapDrafter
FromModelServer = ModelReady | Models | Stack | Rejected
