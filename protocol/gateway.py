"""Settings of the gateway process."""

from pathlib import Path
from typing import Annotated

import msgspec

from protocol.messages import Sampling
from protocol.process.files import remove_folder
from protocol.settings import START_TIMEOUT_S, ChildSettings, Settings


class GatewayModel(Settings, frozen=True, kw_only=True):
    """One model that the gateway offers."""

    names: Annotated[list[str], msgspec.Meta(min_length=1)]
    """What requests may call it; the first is its name in answers."""
    clients_address: str
    """Where its orchestrator listens for clients."""
    folder: str = ""
    """Of the target, for how it writes calls of tools; empty: the model server tells."""
    sampling: Sampling = Sampling()
    """What requests get that do not say otherwise; the model server tells, too."""
    drafters: list[str] = msgspec.field(default_factory=list)
    """Drafters that requests may name besides the one that runs."""


class GatewaySettings(ChildSettings, frozen=True, kw_only=True):
    """The gateway process."""

    models: Annotated[list[GatewayModel], msgspec.Meta(min_length=1)]
    """The first is for requests that name none."""
    model_server: str = ""
    """Where models are asked for before they are used; empty: the only one is always there."""
    load_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 3 * START_TIMEOUT_S
    """Longest wait for a model to be loaded."""
    run_dir: str = ""
    """Folder that goes with the gateway if nobody else removes it; empty: none."""
    listener: int
    """File descriptor of the listening socket. It is the supervisor's, so that connections wait
    in line while a gateway is replaced."""
    hosts: list[str] = msgspec.field(default_factory=list)
    """Names, besides those of loopback, that requests may be addressed to without a key."""
    key_file: str = ""
    """File with the API key, since arguments can be read by everybody; empty: no key."""
    allowed_origins: list[str] = msgspec.field(default_factory=list)
    """Web pages that may use this server from a browser."""
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1)] = 4 * 1024**2
    strict: bool = False
    """Whether requests with fields that the gateway does not know are refused."""
    rate_limit: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Requests for answers that an address may make in a minute; 0 is any number."""
    sampling: Sampling = Sampling()
    """What requests get that do not say otherwise."""
    max_draft_tokens: int = 0
    """Most draft tokens a round that the planner may choose; 0: any number."""

    def on_orphaned(self) -> None:
        """Remove the folder that the supervisor cannot."""
        if self.run_dir:
            remove_folder(Path(self.run_dir))

    @property
    def descriptors(self) -> tuple[int, ...]:
        """See `ChildSettings`."""
        return (self.lifeline, self.listener)
