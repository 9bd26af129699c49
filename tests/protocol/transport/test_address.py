"""Hosts as HTTP clients send them."""

import ipaddress

from hypothesis import given
from hypothesis import strategies as st

from protocol.transport.address import is_loopback, parse_host

_PORTS = st.none() | st.integers(0, 65535)


def _header(host: str, port: int | None) -> str:
    return host if port is None else f"{host}:{port}"


@given(st.ip_addresses(v=4) | st.just(ipaddress.ip_address("127.0.0.1")), _PORTS)
def test_addresses_are_read(address: ipaddress.IPv4Address, port: int | None) -> None:
    """Every IPv4 address, with any port or none, is itself."""
    assert parse_host(_header(str(address), port)) == str(address)


@given(st.ip_addresses(v=6), _PORTS)
def test_bracketed_addresses_are_read(address: ipaddress.IPv6Address, port: int | None) -> None:
    """Every IPv6 address in brackets is itself, without them in its shortest form."""
    assert parse_host(_header(f"[{address.exploded}]", port)) == str(address)


_PIECES = st.sampled_from(
    ["127.0.0.1", "[::1]", "localhost", "[", "]", ":", "80", "@", ".", "%", "%lo", "evil.com", "/",
     "#", "?", "\\", " ", "\t", "::1", "0", "\u0131", "\u212a", "-", ",", ";", "x"]
)  # fmt: skip
_EXACT = {"127.0.0.1", "[::1]", "localhost"}


@given(st.lists(_PIECES, min_size=1, max_size=6).map("".join))
def test_nothing_else_is_this_machine(header: str) -> None:
    """What is taken for loopback is one of its names, alone or before a port."""
    host = parse_host(header)
    if host is None or not is_loopback(host):
        return
    name, colon, port = header.rpartition(":") if not header.endswith("]") else (header, "", "")
    if not colon:
        name = header
    assert not colon or (port.isdigit() and port.isascii() and int(port) < 65536)
    assert name.lower() in _EXACT or ipaddress.ip_address(name.strip("[]")).is_loopback
    assert name.count("[") == name.count("]") == int(":" in name)


def test_forged_hosts() -> None:
    """Headers that only begin like this machine's name have no host."""
    for header in (
        "[::1].evil.com", "[127.0.0.1", "127.0.0.1:80:evil", "[::1", "::1", "[::1]x", "[::1]:",
        "127.0.0.1:", "127.0.0.1:99999", "127.0.0.1:8_0", "[::1%evil.com]", "[127.0.0.1]",
        "localhost@evil.com", "localhost/.evil.com", "localhost .evil.com", "evil.com#localhost",
        "localhost:80\n", "127.0.0.1:\u0661", "", ":80", "localhost..", "x" * 300,
    ):  # fmt: skip
        assert parse_host(header) is None, header
    assert parse_host("LocalHost:8080") == "localhost"
