"""A gateway in this process with a scripted orchestrator: what the model says is given."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any, cast

import uvicorn

from protocol.gateway import GatewayModel, GatewaySettings
from protocol.messages import Finished, FinishReason, Generate, Progress, Statistics, Status, Text
from services.gateway.app import Gateway
from tests.support.tiny_models import tokenizer_json

STATUS = Status(pid=1, model="/models/large", services=[], active=0, waiting=0)

STATISTICS = Statistics(
    ttft_ms=1.0, decode_s=1.0, tok_s=1.0, rounds=1, drafted=0, accepted=0, acceptance_rate=0.0,
    mean_acceptance_length=1.0, per_position=[], cache_hits=0, cache_misses=0, hit_rate=0.0,
    fallbacks={}, overlap_ratio=0.0, phase_ms={}, drafter_restarts=0, verifier_restarts=0,
    plain_rounds=0, plain_tok_s=0.0,
)  # fmt: skip


def finish(reason: FinishReason, **fields: Any) -> Finished:
    """The last message of an answer to a prompt of twenty tokens, eight of them cached."""
    known = {"prompt_tokens": 20, "cached_tokens": 8, **fields}
    return Finished(request=1, reason=reason, statistics=STATISTICS, **known)


class ScriptedClient:
    """An orchestrator that answers each request with the next text, in small pieces.

    What it was asked is in `requests`. An `endless` one repeats its text until it is cancelled.
    """

    def __init__(self, *texts: str, size: int = 3, endless: bool = False) -> None:
        self.texts = list(texts)
        self.size = size
        self.endless = endless
        self.requests: list[Generate] = []
        self.open = 0
        """Requests that are being answered."""
        self.reason: FinishReason = "stop"
        self.stop_string = ""

    async def status(self, timeout_s: float) -> Status:
        return STATUS

    async def generate(
        self, request: Generate, on_progress: Callable[[Progress], None] = lambda _: None
    ) -> AsyncGenerator[Text | Finished]:
        self.requests.append(request)
        text = "" if request.count_only else self.texts.pop(0)
        self.open += 1
        try:
            if request.progress:
                on_progress(Progress(request=1, prompt_tokens=20, computed=20, cached=8))
            for piece in self._cut(text):
                await asyncio.sleep(0)
                yield Text(request=1, tokens=[5], origins=["target"], pieces=[piece])
            prompt = [1, 2, 3] if request.count_only else []
            yield finish(self.reason, stop_string=self.stop_string, prompt=prompt)
        finally:
            self.open -= 1

    def close(self) -> None:
        """Nothing is held."""

    def _cut(self, text: str) -> Iterator[str]:
        while True:
            yield from (text[at : at + self.size] for at in range(0, len(text), self.size))
            if not self.endless:
                return


@contextlib.contextmanager
def serving(client: ScriptedClient, folder: Path | None = None, **settings: Any) -> Iterator[str]:
    """The URL of a gateway in front of this client, for a model folder."""
    full = GatewaySettings(
        lifeline=0,
        listener=0,
        models=[
            GatewayModel(names=["large"], clients_address="", folder=str(folder) if folder else "")
        ],
        **settings,
    )
    application = Gateway(full, lambda _: cast("Any", client)).app("")
    config = uvicorn.Config(application, port=0, log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise AssertionError("the gateway did not start")
            thread.join(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(60)


def write_template(folder: Path, template: str, tokens: Sequence[str] = (), **config: Any) -> Path:
    """A model folder that has only what the gateway reads."""
    described = {"chat_template": template, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")
    tokenizer = json.loads(tokenizer_json())
    first = max(token["id"] for token in tokenizer["added_tokens"]) + 1000
    for number, token in enumerate(tokens, first):
        added = {**tokenizer["added_tokens"][0], "id": number, "content": token}
        tokenizer["added_tokens"].append({**added, "special": token.startswith("<|")})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder
