"""CURVE: authentication and encryption of network connections.

Both ends know each other's public key in advance (pinned); there is no certificate authority and no
trust on first use. Keys are 40 characters of Z85, zmq's format. Only `channel.py` uses the sockets.

zmq's modules for keys and monitoring import asyncio and TLS, so they are imported where they are
used.
"""

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq
from zmq.utils import z85

from protocol.errors import UsageError

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

_DOMAIN = "ssd"
_HANDSHAKE_MS = 5000
"""A client that connects without completing the handshake is disconnected after this time."""
_LETTERS = 40


class KeyPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of this end."""

    public: str
    """The public key."""
    secret: str
    """The secret key; never leaves its file."""


@dataclass(frozen=True)
class ServerLock:
    """The keys of the listening end."""

    keys: KeyPair
    trusted: frozenset[str]
    """Public keys of clients that may connect."""

    def callback(self, domain: str, key: bytes) -> bool:
        """Return True if this client may connect; zmq's authenticator requires this name."""
        return domain == _DOMAIN and key.decode() in self.trusted


@dataclass(frozen=True)
class ClientLock:
    """The keys of the connecting end."""

    keys: KeyPair
    server: str
    """Public key of the expected server."""


Lock = ServerLock | ClientLock


def new_keys() -> KeyPair:
    """Create a key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def check_key(text: str) -> str:
    """Return the text if it can be a public key; raise UsageError otherwise."""
    try:
        whole = len(text) == _LETTERS and len(z85.decode(text.encode("ascii"))) == 32
    except (KeyError, ValueError, UnicodeEncodeError):
        whole = False
    if not whole:
        raise UsageError(f"{text!r} is no public key: those have 40 characters (`ssd keys show`)")
    return text


def read_keys(file: Path) -> KeyPair:
    """Read the key pair in a file.

    Raises:
        UsageError: the file is missing, is not a key file, or is readable by others.
    """
    try:
        open_to_all = stat.S_IMODE(file.stat().st_mode) & 0o077
        pair = msgspec.json.decode(file.read_bytes(), type=KeyPair)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"the key file {str(file)!r} cannot be read: {error}") from error
    if open_to_all:
        raise UsageError(f"others may read the key file {str(file)!r}; make new keys")
    return pair


def secure(
    socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]], lock: Lock
) -> "ThreadAuthenticator | None":
    """Authenticate and encrypt a socket, before it is bound or connected.

    Returns:
        The authenticator of a listening socket; it lives until it is stopped.
    """
    socket.handshake_ivl = _HANDSHAKE_MS
    socket.curve_publickey = lock.keys.public.encode()
    socket.curve_secretkey = lock.keys.secret.encode()
    if isinstance(lock, ClientLock):
        socket.curve_serverkey = lock.server.encode()
        return None
    from zmq.auth.thread import ThreadAuthenticator  # noqa: PLC0415

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(_DOMAIN, lock)
    socket.curve_server = True
    socket.zap_domain = _DOMAIN.encode()
    # Without this, zmq accepts every client if the authenticator's thread is not running.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return authenticator


def poll_failure(monitor: zmq.Socket[bytes]) -> str | None:
    """Return a connection's failure since the last call, or None; `monitor` reports its events."""
    from zmq.utils.monitor import recv_monitor_message  # noqa: PLC0415

    while monitor.poll(0):
        match recv_monitor_message(monitor)["event"]:
            case zmq.Event.HANDSHAKE_FAILED_AUTH:
                return "it does not trust our key; run `ssd keys show` here and trust it there"
            case zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
                return "it does not speak CURVE, and nothing is said in clear"
            case zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
                return "it hung up at once: most likely its key is not the one that we know"
            case zmq.Event.DISCONNECTED:
                return "the connection is lost"
            case _:
                pass
    return None
