"""Every message, typed. One union per direction; each docstring says who sends it and what answers.

A message travels as one msgpack map whose `type` is the struct's tag. Unknown fields are
rejected (`codec.py`). Every message about a round carries (sequence, round), so that a
stale one can be recognised and dropped. Tokens are ids of the *target's* vocabulary.
"""

from typing import Annotated, Any, Literal

import msgspec

PROTOCOL_VERSION = 3

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
"""Most turns of a conversation, stop strings, or whatever else a request lists."""

MAX_ERROR = 4096
"""Longest error of a service, in characters."""
MAX_GRAMMAR_CHARACTERS = 128 * 1024
"""Longest grammar: the models compile it in line with other work."""

MAX_DEPTH = 256
"""Deepest tree, and longest draft."""
MAX_NODES = 64
"""Most draft tokens of a tree that is verified."""
MAX_SIBLINGS = 15
"""Most candidates that a drafter names beside the best one."""

Milliseconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
Tokens = Annotated[list[Token], msgspec.Meta(max_length=MAX_TOKENS)]

Name = Annotated[str, msgspec.Meta(max_length=4096)]
"""The name of a model, a backend or a device; a model's may be a path."""

Parents = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=MAX_BRANCHES)]
"""Of each token of a tree but its first ones, an index; see where it is used."""

END_OF_BRANCH = -1
"""Stands in `DraftTree.tokens` for a branch that has no further token."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of all messages: immutable, tagged, strict."""


class LogitsOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a request does to logits before a token is drawn, in `logits_processor.py`."""

    logit_bias: Annotated[
        tuple[tuple[Token, Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)]], ...],
        msgspec.Meta(max_length=MAX_ITEMS),
    ] = ()
    """Added to the logits of these tokens."""
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.1, le=10.0)] = 1.0
    """Divides positive logits of tokens of the prompt and the answer, multiplies the others."""
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] = 0.0
    """Taken from the logits of the answer's tokens."""
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] = 0.0
    """Taken from the logits of the answer's tokens, as often as they occur in it."""
    grammar: Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR_CHARACTERS)] = ""
    """What the answer must be, in llguidance's Lark dialect; empty: anything."""
    answer_from: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Position of the answer's first token. The orchestrator fills this in, and what follows."""
    answer_until: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Length of the sequence at which the answer is cut off; 0: nowhere. A grammar's end comes
    before that if it can."""
    stop_ids: Annotated[tuple[Token, ...], msgspec.Meta(max_length=MAX_ITEMS)] = ()
    """Tokens that may end an answer where its grammar allows an end."""


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens are drawn; temperature 0 is greedy. `sampling_params.py` checks combinations.

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
    """The drafter's own; None is the target's. It changes what is proposed, not what is said."""
    draft_top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = None
    """The drafter's own; None is the target's."""
    saguaro: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 1.0
    """Rejection rule: the drafter's weight (C) for the tokens that are prepared for; 1 is off."""
    logits_options: LogitsOptions | None = None
    """Bias, penalties, grammar; both models apply them alike."""
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    """Report the target's own log-probability of each token, and of this many best ones."""


class DraftDistribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The distribution that a draft token was drawn from (q): tokens and their probabilities.

    Without tokens: the draft token was not drawn but named (all probability is its own).
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
    """On its own machine."""
    weight_bytes: int
    """Of its part of the model."""
    latency_ms: float
    """Of a small array to the next rank; measured when the group was formed."""
    mbytes_per_s: float
    """Of a large array to the next rank."""
    part: str = ""
    """Its layers, for people: 0-11, or 1/2 of all."""
    free_bytes: int = 0
    """Of its memory once it had loaded; on a machine with several ranks, its share."""
    pass_ms: float = 0.0
    """Of a pass of one token over all ranks, exchanges included; 0: without a model."""
    read_bytes_s: float = 0.0
    """How fast it reads weights; 0: not measured."""


class FeatureRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a drafter reads of the target: hidden states of some layers, for every committed token.

    The layers' outputs stand side by side.
    """

    layers: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=64)]
    """From 0."""
    normalization: Literal["layer", "joint", "final", "none"] = "layer"
    """What is done to the outputs first. layer, joint: each, or all together, are divided by their
    root mean square. final: they go through the target's own last norm."""
    projection: str = ""
    """A safetensors file whose `fc.weight` the verifier applies; empty: none."""
    dtype: Literal["float16", "float32"] = "float16"
    window: Annotated[int, msgspec.Meta(ge=1)] = 4096
    """How many of a sequence's last positions are worth keeping."""


_MillisecondsByRows = Annotated[
    dict[
        Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)],
        Annotated[float, msgspec.Meta(gt=0.0, le=1e9)],
    ],
    msgspec.Meta(max_length=64),
]


class PassTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long a verifier's passes took at load, in milliseconds by their tokens."""

    chains: _MillisecondsByRows = {}
    trees: _MillisecondsByRows = {}


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
    """Tokens the model can attend to; 0 means any number."""
    compute_unit: Name
    max_draft_tokens: int
    """Verifier: longest draft it can roll back (0: it decodes plainly). Drafter: deepest tree."""
    kv_tokens: int = 0
    """Verifier: tokens that the KV of all open sequences may hold together; 0 means any number."""
    kv_limit: Name = ""
    """Verifier: what `kv_tokens` follows from, for people."""
    rewinding: Name = ""
    """Verifier: the kinds of its model's layers, and how they go back after a rejected draft."""
    weight_bytes: int = 0
    """Verifier: how much of its weights a pass over few tokens reads; 0: unknown."""
    started_ns: int = 0
    """When its process began, by the machine's monotonic clock; 0 means unknown."""
    ranks: list[RankStatus] = []
    """Verifier: the processes that the model is spread over; empty for a single one."""
    pass_times: PassTimes = PassTimes()
    """Verifier: what the planner starts from; empty: not measured."""
    features: FeatureRequest | None = None
    """Drafter: what it reads of the target; None if it reads nothing."""
    takes_trees: bool = False
    """Verifier: whether `Verify` may carry a tree. Drafter: whether `Prepare` may, and whether it
    answers with trees if it is asked for siblings."""


class Welcome(Message, frozen=True, tag="welcome"):
    """Orchestrator -> service: the handshake is complete."""


RejectedKind = Literal["invalid", "busy", "unavailable"]
"""What is in the way: the request itself, other requests, or the stack's state."""


class Rejected(Message, frozen=True, tag="rejected"):
    """Orchestrator -> service or client: the message is refused, for this reason."""

    reason: str
    kind: RejectedKind = "invalid"
    request: int = 0
    """The client's request that is refused; 0 if the message was no request."""


class Stop(Message, frozen=True, tag="stop"):
    """Orchestrator -> service: finish now, exit with code 0. No answer."""


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Service -> orchestrator: the working thread is alive. Answer: Heartbeat.

    Sent when nothing else was sent for a second. `sequence` is what is being worked on, 0
    while the service waits for work; the orchestrator's answer repeats it.
    """

    sequence: int = 0
    busy_s: Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)] = 0.0
    """How long the call that begins now may take, where that is long: silence until then is no
    hang."""


class Identify(Message, frozen=True, tag="identify"):
    """Orchestrator -> service: you are unknown here (a restart?); say Hello. Answer: Hello.

    Open sequences are forgotten on both sides.
    """


class Failed(Message, frozen=True, tag="failed", kw_only=True):
    """Service -> orchestrator: the sequence could not be served; the process goes on."""

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
    """How many of them were not computed, because the KV of another sequence had them."""
    at_ns: int = 0
    """When it was sent, on the sender's monotonic clock; 0 if unknown."""


class PrefillProgress(Message, frozen=True, tag="prefilling", kw_only=True):
    """Verifier -> orchestrator: the sequence holds `length` tokens so far. No answer.

    Sent now and then while a long prompt is computed.
    """

    sequence: int
    length: Annotated[int, msgspec.Meta(ge=0)]


class CloseSequence(Message, frozen=True, tag="close", kw_only=True):
    """Orchestrator -> service: the sequence is over. No answer.

    The service may keep its KV, within bounds of its own, for a sequence with the same beginning.
    """

    sequence: int


class Features(Message, frozen=True, tag="features", kw_only=True):
    """Verifier -> orchestrator -> drafter: the target's states at `count` committed tokens.

    Sent before the `Prefilled` or `VerificationOutcome` that commits these tokens, and again
    for a drafter that came later. No answer.
    """

    sequence: int
    first: Annotated[int, msgspec.Meta(ge=0)]
    """Position of the first token."""
    count: Annotated[int, msgspec.Meta(ge=1)]
    data: bytes
    """[count, width] numbers of `FeatureRequest.dtype`, little-endian."""
    request: Annotated[int, msgspec.Meta(ge=0)] = 0
    """`ReadTarget.number`: what was under way for another drafter is not for this one."""


# ---------------------------------------------------------------- verifier


class ReadTarget(Message, frozen=True, tag="read", kw_only=True):
    """Orchestrator -> verifier: send these features from now on, and first what there is of them.

    Without `features`: send none any more. Answer: Failed of sequence 0 if that cannot be done.
    """

    features: FeatureRequest | None = None
    number: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Later ones have larger numbers."""
    sequence: Literal[0] = 0
    """None; every sequence is meant."""


class Verify(Message, frozen=True, tag="verify", kw_only=True, omit_defaults=True):
    """Orchestrator -> verifier: verify a tree of draft tokens. Answer: VerificationOutcome.

    nodes[0] is the pending token and `position` its position; the KV holds exactly the tokens
    before it, which the verifier checks. nodes[i] follows nodes[parents[i - 1]], an earlier one;
    without parents each follows the one before it: a chain. Siblings differ
    (`protocol.decoding.token_tree`).
    """

    sequence: int
    round: int
    position: int
    nodes: Tokens
    parents: Parents = []
    distributions: Annotated[list[DraftDistribution], msgspec.Meta(max_length=MAX_BRANCHES)] = []
    """What nodes[1:] was drawn from, under the rejection rule, which judges chains alone; empty
    if nothing was drawn."""
    granted: Annotated[int, msgspec.Meta(ge=0)] = 0
    """How many tokens may follow the outcome unasked. Each comes from a pass over the token before
    it alone, and as if asked for by a `Verify`: an outcome of its own, in rounds counted on."""
    stop_ids: Tokens = []
    """Tokens after which none follows unasked."""
    drafter_idle: bool = False
    """Whether no draft is prepared meanwhile, so that the drafter's cores are free."""


class Revoke(Message, frozen=True, tag="revoke", kw_only=True):
    """Orchestrator -> verifier: no more tokens unasked than are announced already.

    The outcome that was announced last says that none follows. A verifier that has ended them by
    itself meanwhile has said so, and does nothing.
    """

    sequence: int
    round: int
    """Of the `Verify` that granted them."""


class Extend(Message, frozen=True, tag="extend", kw_only=True):
    """Orchestrator -> verifier: more tokens may follow unasked than its `Verify` said.

    Sent long before they have come to an end, so that the verifier need not stand still. One that
    has ended them by itself meanwhile has said so, and does nothing.
    """

    sequence: int
    round: int
    """Of that `Verify`."""
    granted: Annotated[int, msgspec.Meta(ge=1)]
    """How many more."""


class TokenLogprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The target's own log-probability of an emitted token, and of the likeliest ones."""

    own: float
    best: list[tuple[Token, float]]


class VerificationOutcome(Message, frozen=True, tag="outcome", kw_only=True, omit_defaults=True):
    """Verifier -> orchestrator: `accepted` draft tokens stand, then comes `bonus`."""

    sequence: int
    round: int
    accepted: Annotated[int, msgspec.Meta(ge=0)]
    bonus: Token
    goes_on: bool = False
    """Whether the next token follows unasked (`Verify.granted`)."""
    node: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Of a tree: the index of the last token that stands, `accepted` steps from the first."""
    verify_ms: float
    idle_ms: float
    """Time the verifier waited between its last answers and this forward pass."""
    sequences: Annotated[int, msgspec.Meta(ge=1)] = 1
    """How many sequences were verified in this pass."""
    logprobs: list[TokenLogprobs] = []
    """Of the accepted tokens and the bonus token, if the request asked for them."""
    rows: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Tokens of all their trees; 0 stands for this tree's own."""
    at_ns: int = 0
    """When it was sent, on the sender's monotonic clock; 0 if unknown."""

    @property
    def row(self) -> int:
        """The index of the last token that stands, of a tree or a chain."""
        return self.accepted if self.node is None else self.node


# ---------------------------------------------------------------- drafter


class Prepare(Message, frozen=True, tag="prepare", kw_only=True, omit_defaults=True):
    """Orchestrator -> drafter: prepare branches for the outcomes of a verification.

    `tokens` are the committed tokens from position `base` on, so that a drafter can first
    rewind to `base`. What is verified follows them, `nodes` and `parents` as in `Verify`.
    `fan_out[i]` bonus tokens are wanted behind nodes[i], none of them a child of it, each
    continued for up to `depth` tokens. Answer: a stream of DraftTree, one per depth, until
    done or until a newer message arrives.
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
    """How many of the best tokens Saguaro sampling holds back (F)."""
    siblings: Annotated[int, msgspec.Meta(ge=0, le=MAX_SIBLINGS)] = 0
    """How many candidates are wanted beside the best one, wherever a token is drafted. They
    cost the drafter no forward pass."""


class DraftNow(Message, frozen=True, tag="draft", kw_only=True, omit_defaults=True):
    """Orchestrator -> drafter: the target waits; draft `count` tokens after `pending` at once.

    Answer: DraftTree with the single branch (accepted, pending), one per depth. With a count of 0
    there is no answer: it ends a draft that is not waited for any more, or has the drafter take in
    tokens before it is asked for a draft.
    """

    sequence: int
    round: int
    base: Annotated[int, msgspec.Meta(ge=0)]
    tokens: Tokens
    pending: Token
    accepted: Annotated[int, msgspec.Meta(ge=0)]
    count: Annotated[int, msgspec.Meta(ge=0)]
    held_back: Annotated[int, msgspec.Meta(ge=0)] = 0
    """See `Prepare`, as for the next one."""
    siblings: Annotated[int, msgspec.Meta(ge=0, le=MAX_SIBLINGS)] = 0


class DraftTree(Message, frozen=True, tag="tree", kw_only=True, omit_defaults=True):
    """Drafter -> orchestrator: one depth of every branch prepared in `round`.

    Depth 1 carries `outcomes`, a pair (index of the last node that stands, bonus token) per
    branch, which later depths leave empty; in a chain that index is the number of accepted
    tokens. Without `parents`, tokens[b] is the depth-th draft token of branch b, or
    END_OF_BRANCH. With them, tokens[b] follows token parents[b] of the depth before, at depth 1
    outcome parents[b]; siblings stand in falling order of likelihood. `last` says that no deeper
    message of this round follows.
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
    """Per token, how sure the drafter is of it: its own probability, 0 to 1."""
    distributions: Annotated[list[DraftDistribution], msgspec.Meta(max_length=MAX_BRANCHES)] = []
    """Per branch, what its token was drawn from; empty if none was drawn."""
    draft_ms: Milliseconds
    """Time the drafter worked for this message."""
    last: bool = False
    at_ns: int = 0
    """When it was sent, on the sender's monotonic clock; 0 if unknown."""


Greeting = Welcome | Rejected | Identify | Heartbeat | Stop
ToDrafter = OpenSequence | Prepare | DraftNow | CloseSequence | Features | Greeting
FromDrafter = Hello | Prefilled | DraftTree | Failed | Heartbeat
FromDraftServer = FromDrafter | Rejected  # over a network it may be busy
ToVerifier = OpenSequence | Verify | Revoke | Extend | CloseSequence | ReadTarget | Greeting
FromVerifier = (
    Hello | Prefilled | PrefillProgress | VerificationOutcome | Features | Failed | Heartbeat
)
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
    """One turn of a conversation, as chat templates know it."""

    role: str
    content: str
    name: str = ""
    tool_calls: list[dict[str, Any]] = []
    """What the assistant called: {type, id, function: {name, arguments}}, arguments as a map."""
    tool_call_id: str = ""
    """Which call this tool's message answers."""
    reasoning_content: str = ""
    """What the assistant thought before it answered; templates decide what to do with it."""


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
    """Functions that the model may call, as its chat template shows them."""
    template_options: dict[str, Any] = {}
    """Further variables of the chat template, such as enable_thinking."""
    sampling: Sampling = Sampling()
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 256
    stop: Annotated[list[str], msgspec.Meta(max_length=MAX_ITEMS)] = []
    mode: Mode = "ssd"
    num_draft_tokens: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """Draft tokens per round; 0: the planner decides."""
    max_draft_tokens: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """Most draft tokens per round that the planner may choose; 0: any number."""
    branches: Annotated[int, msgspec.Meta(ge=0, le=MAX_PREPARED)] = 0
    """Branches prepared per round (B); 0 leaves it to the orchestrator."""
    tree_nodes: Annotated[int, msgspec.Meta(ge=0, le=MAX_NODES)] = 0
    """Draft tokens of the trees that are verified; 0 and 1: chains."""
    trace: bool = False
    """Whether `Finished` is to hold the timeline."""
    answer_tokens: Tokens = []
    """What the answer begins with: the client has these tokens already."""
    answer_start: str = ""
    """The same as text, which follows `answer_tokens`."""
    special_text: bool = False
    """Whether special tokens are text too, stop tokens aside: some models mark thoughts or
    calls of tools by them."""
    client: str = ""
    """With whose requests this one shares the places; empty: its connection's own."""
    group: int = 0
    """Shared by all answers to one request of that client; 0: there is only this one."""
    is_background: bool = False
    """Whether requests that are not may go before it: nobody waits for its answer."""
    count_only: bool = False
    """Only tokenise the prompt: Finished comes at once, with its tokens and without an answer."""
    progress: bool = False
    """Whether the client wants `Progress` while its prompt is computed."""


class Cancel(Message, frozen=True, tag="cancel", kw_only=True):
    """Client -> orchestrator: stop this request; Finished("cancelled") follows."""

    request: int


Origin = Literal["target", "hit", "miss", "lookup"]
"""Where an emitted token came from: the target's own, or an accepted draft token of a
chain that was prepared in time (hit), drafted while the target waited (miss), or found by
lookup in prompt and answer (lookup)."""
TokenOrigin = Literal["target", "hit", "miss", "lookup", "branch"]
"""The same, with accepted draft tokens that only a tree offered beside the likeliest chain."""


class ShownToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token as clients see it, with the target's own log-probability of it."""

    text: str
    data: list[Annotated[int, msgspec.Meta(ge=0, le=255)]]
    """Its bytes: the text may be a part of a character."""
    logprob: float


class Logprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One emitted token, and the likeliest ones at its place."""

    chosen: ShownToken
    best: list[ShownToken]


class Text(Message, frozen=True, tag="text", kw_only=True):
    """Orchestrator -> client: newly emitted tokens, and the text that became certain with each.

    Text that was held back until the end comes as a last piece without a token.
    """

    request: int
    tokens: Tokens
    origins: list[TokenOrigin]
    pieces: list[str]
    logprobs: list[Logprobs] = []
    """One per token, if asked for; they come when all of the token's text is certain, too."""

    @property
    def text(self) -> str:
        """All pieces together."""
        return "".join(self.pieces)


class Progress(Message, frozen=True, tag="progress", kw_only=True):
    """Orchestrator -> client, if it asked for it: how much of the prompt is computed.

    Sent now and then while a long prompt is computed, and once when all of it is.
    """

    request: int
    prompt_tokens: int
    computed: int
    """Or taken from the KV of earlier requests."""
    cached: int = 0
    """How many were taken from there; known once the whole prompt is computed."""


class RoundStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rounds whose chain came from one origin, added up, without a request's first."""

    rounds: int = 0
    tokens: int = 0
    """What they brought, bonus tokens included."""
    drafted: int = 0
    """Draft tokens that they verified."""
    verify_ms: float = 0.0
    cache_lookups: int = 0
    """Rounds beside which a drafter prepared outcomes: each ends with a look into the
    speculation cache."""
    cache_hits: int = 0
    """How many of these ended in a prepared outcome."""


class Statistics(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one request did. Definitions: docs/guide/statistics.md; times in the unit named."""

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
    """Rounds that offered a draft token at each position, and below those that kept it."""
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
    """Rounds without speculation because plain decoding was faster, or to measure it."""
    predicted_tok_s: float
    """What the planner predicted before each round, over the whole answer; 0 if it could not."""
    stale_trees: int = 0
    """Messages of the drafter that were dropped: too late, twice, or out of order."""
    plain_tok_s: float
    """Speed of plain decoding beside which speculation was judged; 0 if it was not measured
    since the orchestrator started, too long ago, or on a machine that has become slower or
    faster since."""
    plain_age_s: float = 0.0
    """How long before the end of the answer it was measured last."""
    tree_rounds: int = 0
    """Rounds that verified a tree that is no chain."""
    branch_tokens: int = 0
    """Accepted draft tokens that stood beside the likeliest chain: what trees added."""
    drafter: str = ""
    """Backend and model that drafted, the last if there were several; empty: none."""
    state_bytes: int = 0
    """The target's states that went to the drafter while it decoded, in bytes."""
    offered_by_lag: list[int] = []
    """Draft tokens by lag, from 1: how many tokens before them the target had not seen yet when
    they were drafted. In a chain that was prepared these are the chain before it, too."""
    accepted_by_lag: list[int] = []
    rewinding: str = ""
    """As in `Hello`."""
    by_origin: dict[Origin, RoundStats] = {}
    hits_by_rank: list[int] = []
    """How often the outcome was the i-th best candidate that was prepared for its length."""
    draft_wait_ms: float = 0.0
    """Total time in which the target waited for a draft."""


HISTOGRAM_BOUNDS_MS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
"""Upper bounds of the classes in which times of rounds are counted; one more class follows."""


class TimingHistogram(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often a time fell into each class of `HISTOGRAM_BOUNDS_MS`, and the sum of all."""

    counts: list[int]
    sum_ms: float


FinishReason = Literal["stop", "length", "context", "cancelled", "error"]


Track = Literal["orchestrator", "verifier", "drafter"]


class TraceEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a process did for a request, and when, on the machine's monotonic clock."""

    track: Track
    name: str
    start_us: float
    duration_us: float
    details: dict[str, int | str] = {}


class Finished(Message, frozen=True, tag="finished", kw_only=True):
    """Orchestrator -> client: the request is over."""

    request: int
    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int = 0
    """How many of them the target took from the KV of earlier requests."""
    statistics: Statistics
    histograms: dict[str, TimingHistogram] = {}
    """Per phase, the times of the rounds whose medians are in `statistics`."""
    stop_string: str = ""
    """The stop string that ended the answer, if one did."""
    error: str = ""
    prompt: Tokens = []
    """The prompt itself, if it was only to be counted."""
    timeline: list[TraceEvent] = []
    """If it was asked for."""

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens that the target's prefill computed.

        The prompt's last token is not among them: the first verification computes it.
        """
        return max(0, self.prompt_tokens - 1 - self.cached_tokens)


class StatusRequest(Message, frozen=True, tag="status?"):
    """Client or supervisor -> orchestrator: report your state. Answer: Status."""

    request: int = 0
    """One of the client's own requests, to learn whether it is still served; 0 asks for none."""
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
    """As in `Hello`, and the next."""
    ranks: list[RankStatus] = []
    silent_s: float = 0.0
    """Since the last sign of life of its working thread, while the orchestrator was awake."""


class WindowStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all requests together did in the last `seconds`, ten at most.

    Definitions as in `Statistics`, but for `tok_s`.
    """

    seconds: float = 0.0
    busy_s: float = 0.0
    """Time of it in which any request was running."""
    requests: int = 0
    """Those that ended in it."""
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
    """What the planner would do in the next round."""

    mode: Mode = "ssd"
    speculating: bool = False
    """False: plain decoding, because it is faster, is being measured, or was asked for."""
    num_draft_tokens: int = 0
    """Longest draft that would be verified; 0 for plain decoding."""
    branches: int = 0
    """Branches that would be prepared (B); 0 where none are."""
    speculative_tok_s: float = 0.0
    """Speed of recent speculative rounds, per request; 0 if there were none lately."""
    plain_tok_s: float = 0.0
    """Speed of plain rounds, per request; 0 if not measured, as in `Statistics`."""
    plain_age_s: float = 0.0
    """How long ago it was measured last."""


SequenceState = Literal["prefill", "verify", "draft", "stranded"]
"""What a sequence waits for: the prompt, a verification, a draft, or a verifier."""


class SequenceStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One running request, up to now."""

    sequence: int
    state: SequenceState
    age_s: float
    """Since the request arrived."""
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int = 0
    """Of the prompt, while it is computed; told now and then."""
    tokens: int
    """Emitted."""
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
    """Why the last service of a role was refused, until one is welcomed."""
    marked_for_kill: dict[int, str] = {}
    """Processes that hang or send invalid messages, by pid, and why: the supervisor kills them."""
    dropped: int = 0
    """Messages, ever, to services and clients that were gone or did not read."""
    longest_step_ms: float = 0.0
    """Processor time of the longest step of the orchestrator's loop in the last seconds."""
    request: int = 0
    """The request that was asked about."""
    question: int = 0
    """The question that this answers."""
    serving: bool = False
    """Whether it is answered or waits."""
    degraded: list[str] = []
    """What does not work as it should, in sentences; empty if all is well."""
    window: WindowStats = WindowStats()
    """What all requests did in the last seconds."""
    planner: PlannerState = PlannerState()
    """For a request that leaves everything to the planner."""
    sequences: list[SequenceStatus] = []
    """The running requests, the first 64 of them."""
    lookup_only: bool = False
    """Whether no drafter is wanted: prompt lookup in the orchestrator drafts alone."""

    @property
    def drafter(self) -> ServiceStatus | None:
        """The drafter process, if there is one."""
        return next((one for one in self.services if one.role == "drafter"), None)

    @property
    def draft_backend(self) -> str | None:
        """The backend that drafts; None while the drafter is away."""
        if self.drafter is not None:
            return self.drafter.backend
        return "ngram" if self.lookup_only else None


class ServiceDown(Message, frozen=True, tag="down", kw_only=True):
    """Supervisor -> orchestrator: a process ended; `final` means that none will replace it."""

    role: Role
    pid: int
    reason: str
    final: bool
    removed: bool = False
    """A drafter that was taken away on purpose: prompt lookup drafts alone from now on."""


ToOrchestrator = Generate | Cancel | StatusRequest | ServiceDown
FromOrchestrator = Text | Progress | Finished | Rejected | Status


# ---------------------------------------------------------------- the orchestrator's helper


class EncodePrompt(Message, frozen=True, tag="encode", kw_only=True):
    """Orchestrator -> prompt worker: render and tokenise this. Answer: PromptTokens or Rejected.

    The fields are those of `Generate`.
    """

    messages: list[ChatMessage] = []
    text: str = ""
    tools: list[dict[str, Any]] = []
    template_options: dict[str, Any] = {}
    answer_tokens: Tokens = []
    answer_start: str = ""


class WorkerReady(Message, frozen=True, tag="ready"):
    """Prompt worker -> orchestrator: the tokenizer is loaded."""


class PromptTokens(Message, frozen=True, tag="tokens", kw_only=True):
    """Prompt worker -> orchestrator: the prompt."""

    tokens: Tokens


ToPromptWorker = EncodePrompt | Stop
FromPromptWorker = WorkerReady | PromptTokens | Rejected


# ---------------------------------------------------------------- supervisor's control socket


class SwapDrafter(Message, frozen=True, tag="swap", kw_only=True):
    """CLI -> supervisor: replace the drafter of the running stack. Answer: Done or Rejected."""

    backend: str
    model: str = ""
    command: list[str] = []
    """Backend stdio: the program that drafts, and its arguments."""
    lines: bool = False
    """Backend stdio: whether it speaks the line protocol."""
    server: str = ""
    """Backend remote: where the draft server listens."""
    server_key: str = ""
    """Backend remote: its public key, or the name under which it is trusted."""


class StackRequest(Message, frozen=True, tag="stack?"):
    """CLI -> supervisor: list your processes. Answer: Stack."""


ProcessState = Literal["starting", "running", "died", "lost"]
"""`died`: another one is started in its place; `lost`: it was restarted too often."""


class ProcessStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One child of the supervisor."""

    role: str
    pid: int
    backend: str
    model: str
    state: ProcessState
    restarts: int
    note: str = ""
    """More about the state, for people: why it died, where it listens, how long it loads."""
    device: str = ""
    """The device it was started for; empty is MLX's own choice."""


class Stack(Message, frozen=True, tag="stack", kw_only=True):
    """Supervisor -> CLI: the processes of this stack."""

    processes: list[ProcessStatus]


class Done(Message, frozen=True, tag="done"):
    """Supervisor -> CLI: the command was carried out."""


ToSupervisor = SwapDrafter | StackRequest
FromSupervisor = Stack | Done | Rejected


# ---------------------------------------------------------------- several models

ModelState = Literal["unloaded", "loading", "loaded", "unloading", "failed"]
"""`failed`: it could not be loaded, or ended by itself; it is tried again when it is asked for."""


class ModelStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of the models that are served."""

    name: Name
    state: ModelState
    stack: Name
    """Name of its stack while it is loaded, as in `ssd top --name`."""
    note: str = ""
    """More about the state, for people: why it failed, what it waits for."""
    memory_bytes: int = 0
    """What its processes hold; of one that is not loaded an estimate, 0 if there is none."""
    answering: int = 0
    """Requests that hold it."""
    waiting: int = 0
    """Requests that wait for it to be loaded."""


class UseModel(Message, frozen=True, tag="use", kw_only=True):
    """Gateway -> model server: load this model if it is not, and keep it until it is released.

    Each use has a connection of its own. Answer: ModelReady or Rejected, when it is known.
    """

    model: Name
    drafter: Name = ""
    """One of the model's own drafters; empty: whichever runs."""


class ReleaseModel(Message, frozen=True, tag="release"):
    """Gateway -> model server: the use of this connection is over, or not wanted. No answer."""


class ModelReady(Message, frozen=True, tag="usable", kw_only=True):
    """Model server -> gateway: the model is loaded and stays so."""

    folder: Name
    """Of the target."""
    sampling: Sampling
    """What requests get that do not say otherwise."""


class ModelsRequest(Message, frozen=True, tag="models?"):
    """Gateway or CLI -> model server: describe your models. Answer: Models."""


class Models(Message, frozen=True, tag="models", kw_only=True):
    """Model server -> gateway or CLI: all models, in the order of their file."""

    models: list[ModelStatus]


ToModelServer = UseModel | ReleaseModel | ModelsRequest | StackRequest | SwapDrafter
FromModelServer = ModelReady | Models | Stack | Rejected
