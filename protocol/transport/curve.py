"""CURVE: who may be at the other end of a network connection, and that nobody else can read it.

Both ends know each other's public key beforehand (pinned); there is no authority and no first
trust. Keys are 40 characters of Z85, as zmq writes them. Only `channel.py` uses the sockets.

What zmq brings for keys and connections imports asyncio and TLS. Every process of a stack imports
this module and few need that, so it is imported where it is used.
"""

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import zmq
from zmq.utils import z85

from protocol.errors import UsageError

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

_DOMAIN = "ssd"
_HANDSHAKE_MS = 5000
"""A stranger who connects and says nothing is put out after so long."""
_LETTERS = 40


class KeyPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who we are."""

    public: str
    """May be known to everybody."""
    secret: str
    """Stays in its file."""


@dataclass(frozen=True)
class ServerLock:
    """For the end that listens."""

    own: KeyPair
    trusted: frozenset[str]
    """Public keys of those who may connect."""

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether this client may connect; zmq's authenticator asks it under this name."""
        return domain == _DOMAIN and key.decode() in self.trusted


@dataclass(frozen=True)
class ClientLock:
    """For the end that connects."""

    own: KeyPair
    server: str
    """Public key of the one that must be there."""


Lock = ServerLock | ClientLock


class Monitor(NamedTuple):
    """Where zmq tells what happens to a connection."""

    socket: zmq.Socket[bytes]


def new_keys() -> KeyPair:
    """A new pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def check_key(text: str) -> str:
    """The text, if it can be a public key; raises UsageError if not."""
    try:
        whole = len(text) == _LETTERS and len(z85.decode(text.encode("ascii"))) == 32
    except (KeyError, ValueError, UnicodeEncodeError):
        whole = False
    if not whole:
        raise UsageError(f"{text!r} is no public key: those have 40 characters (`ssd keys show`)")
    return text


def read_keys(file: Path) -> KeyPair:
    """The pair in a file.

    Raises:
        UsageError: it is not there, is no key file, or others may read it.
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
    """Close a socket to strangers, before it is bound or connected.

    Returns:
        What judges who may connect, for the end that listens; it lives until it is stopped.
    """
    socket.handshake_ivl = _HANDSHAKE_MS
    socket.curve_publickey = lock.own.public.encode()
    socket.curve_secretkey = lock.own.secret.encode()
    if isinstance(lock, ClientLock):
        socket.curve_serverkey = lock.server.encode()
        return None
    from zmq.auth.thread import ThreadAuthenticator  # noqa: PLC0415

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(_DOMAIN, lock)
    socket.curve_server = True
    socket.zap_domain = _DOMAIN.encode()
    # Without this, zmq lets everybody in if the judge's thread is not there.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return authenticator


def monitor(socket: zmq.Socket[bytes]) -> Monitor:
    """Watch a socket that is about to connect."""
    return Monitor(socket.get_monitor_socket())


def poll_failure(watch: Monitor) -> str | None:
    """Return what went wrong with the connection since the last call; None if nothing did."""
    from zmq.utils.monitor import recv_monitor_message  # noqa: PLC0415

    while watch.socket.poll(0):
        match recv_monitor_message(watch.socket)["event"]:
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
