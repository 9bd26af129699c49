"""Settings of the gateway process."""

from pathlib import Path
from typing import Annotated

import msgspec

from protocol.messages import Sampling
from protocol.process.files import remove_folder
from protocol.settings import START_TIMEOUT_S, ChildSettings, Settings


class GatewayModel(Settings, frozen=True, kw_only=True):
    """A model that the gateway offers."""

    names: Annotated[list[str], msgspec.Meta(min_length=1)]
    """Names that requests may use; the first appears in answers."""
    clients_address: str
    """Address at which its orchestrator listens for clients."""
    folder: str = ""
    """Folder of the target, for its tool call format; empty: the model server reports it."""
    sampling: Sampling = Sampling()
    """Defaults of requests; the model server reports them, too."""
    drafters: list[str] = msgspec.field(default_factory=list)
    """Drafters that requests may name besides the running one."""


class GatewaySettings(ChildSettings, frozen=True, kw_only=True):
    """The gateway process."""

    models: Annotated[list[GatewayModel], msgspec.Meta(min_length=1)]
    """Requests that name no model use the first."""
    model_server: str = ""
    """Address of the model server that loads models; empty: the only model is always there.
    """
    load_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 3 * START_TIMEOUT_S
    """Longest wait for a model to be loaded."""
    run_dir: str = ""
    """Folder that the gateway removes if no other process does; empty: none."""
    listener: int
    """File descriptor of the listening socket. The supervisor owns it, so that connections wait
    in line while a gateway is replaced.
    """
    hosts: list[str] = msgspec.field(default_factory=list)
    """Host names, besides loopback, that requests without a key may be addressed to."""
    key_file: str = ""
    """File with the API key, since arguments are visible to everyone; empty: no key."""
    allowed_origins: list[str] = msgspec.field(default_factory=list)
    """Origins of web pages that may use this server from a browser."""
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1)] = 4 * 1024**2
    strict: bool = False
    """Reject requests with unknown fields."""
    rate_limit: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Most generation requests per address and minute; 0 is unlimited."""
    sampling: Sampling = Sampling()
    """Defaults of requests."""
    max_draft_tokens: int = 0
    """Limit on the planner's draft tokens per round; 0 is unlimited."""

    def on_orphaned(self) -> None:
        """Remove the folder that the supervisor cannot."""
        if self.run_dir:
            remove_folder(Path(self.run_dir))

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Inherited file descriptors (`ChildSettings`)."""
        return (self.lifeline, self.listener)
