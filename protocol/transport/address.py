"""Addresses of sockets: paths of Unix sockets, and hosts."""

import ipaddress
import re
import socket

from protocol.errors import RuntimeFailure

IPC = "ipc://"
TCP = "tcp://"
_LONGEST_PATH = 103
"""`sun_path` holds 104 bytes on macOS, 108 on Linux."""


def ipc_address(path: str) -> str:
    """Return the zmq address of a Unix socket path; raise RuntimeFailure if it is too long."""
    if len(path.encode()) > _LONGEST_PATH:
        raise RuntimeFailure(
            f"the socket path {path!r} is longer than {_LONGEST_PATH} bytes; "
            "set SSD_RUN_DIR to a short one"
        )
    return f"{IPC}{path}"


def is_loopback(host: str) -> bool:
    """Return True if a host, by name or number and without a port, is this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_HOST = re.compile(
    r"(?:\[(?P<six>[0-9a-f:.]{2,45})\]|(?P<name>[a-z0-9_](?:[a-z0-9_-]|\.(?=[a-z0-9_])){0,252}))"
    r"(?::(?P<port>[0-9]{1,5}))?",
    re.ASCII | re.IGNORECASE,
)


def parse_host(header: str) -> str | None:
    """Return the host of an HTTP `Host` header in lower case, without port and brackets.

    None if the header is not exactly `NAME`, `IPV4` or `[IPV6]`, with or without `:PORT`. A
    partially parsed header might be mistaken for this machine.
    """
    match = _HOST.fullmatch(header)
    if match is None or int(match["port"] or 0) > 65535:
        return None
    if match["name"] is not None:
        return match["name"].lower()
    try:
        return str(ipaddress.IPv6Address(match["six"]))
    except ValueError:
        return None


def split_host(address: str) -> tuple[str, str]:
    """Return host and port of `tcp://HOST:PORT`, without the brackets of an IPv6 address."""
    host, _, port = address.removeprefix(TCP).rpartition(":")
    return host.strip("[]"), port


def find_tcp_error(address: str, timeout_s: float) -> str:
    """Connect once to `tcp://HOST:PORT`; return the error, empty if there is none.

    The limit excludes name resolution, which takes as long as the system allows.
    """
    host, port = split_host(address)
    try:
        with socket.create_connection((host, int(port)), timeout_s):
            return ""
    except (OSError, ValueError, OverflowError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return f"nothing can be reached at {address}: {reason}"
