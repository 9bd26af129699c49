"""Our keys, and the trusted public keys of other machines, in a private folder."""

import contextlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from launch.settings.paths import keys_dir
from protocol.errors import UsageError
from protocol.process.files import write_atomically
from protocol.transport.curve import check_key, new_keys, read_keys

DEFAULT_KEY = "default"
_TRUSTED = "trusted"


@dataclass(frozen=True)
class RemoteServer:
    """A draft server on another machine."""

    address: str
    key: str
    """Its public key."""
    key_file: Path
    """Our keys for it."""


def remote_server_of(address: str, key: str, own_key: str) -> RemoteServer:
    """Return the draft server that the settings name; raise UsageError on an error.

    Args:
        address: tcp://HOST:PORT.
        key: its public key, or its name in the list of trusted keys.
        own_key: name of our keys for it.
    """
    if not address:
        raise UsageError("--draft-server-key needs --draft-server")
    if not key:
        raise UsageError(
            f"the draft server {address} needs its public key (--draft-server-key): "
            "`ssd keys show` prints it there; nothing is sent unencrypted"
        )
    return RemoteServer(check_address(address), public_key(key), own_keys(own_key))


def check_address(address: str) -> str:
    """Return the address if it is a TCP address; raise UsageError otherwise."""
    if not re.fullmatch(r"tcp://\S+:\d{1,5}", address):
        raise UsageError(f"{address!r} is not the address of a draft server; write tcp://HOST:PORT")
    return address


def make_keys(name: str) -> str:
    """Create a key pair of this name; return its public key, or raise UsageError if it exists."""
    file = _file(_folder(), name)
    pair = new_keys()
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise UsageError(f"a key named {name!r} exists already: {str(file)!r}") from error
    with os.fdopen(descriptor, "wb") as out:
        out.write(msgspec.json.encode(pair))
    return pair.public


def own_keys(name: str) -> Path:
    """Return the file of our keys of this name; raise UsageError if they cannot be used."""
    file = _file(_folder(), name)
    if not file.exists():
        raise UsageError(f"no key named {name!r}; make one with `ssd keys new {name}`")
    read_keys(file)
    return file


def list_own_keys() -> dict[str, str]:
    """Return our keys: name and public key."""
    return {file.stem: read_keys(file).public for file in sorted(_folder().glob("*.json"))}


def trust(name: str, key: str) -> None:
    """Pin a public key under a name; raise UsageError if the name has another one."""
    file = _pin(name)
    check_key(key)
    if file.exists() and file.read_text(encoding="ascii") != key:
        raise UsageError(f"{name!r} is trusted with another key; `ssd keys forget {name}` first")
    write_atomically(file, key)


def forget(name: str) -> None:
    """Stop trusting a name; raise UsageError if it was not trusted."""
    try:
        _pin(name).unlink()
    except FileNotFoundError as error:
        raise UsageError(f"no trusted key named {name!r}") from error


def list_trusted_keys() -> dict[str, str]:
    """Return the trusted keys: name and public key."""
    pins = sorted((_folder() / _TRUSTED).iterdir())
    return {pin.name: check_key(pin.read_text(encoding="ascii")) for pin in pins}


def public_key(text: str) -> str:
    """Return the public key of a trusted name, or the key itself.

    Raises:
        UsageError: the text is neither.
    """
    if re.fullmatch(r"[\w.-]{1,39}", text):
        trusted = list_trusted_keys()
        if text not in trusted:
            raise UsageError(
                f"no trusted key named {text!r}; add it with `ssd keys trust {text} KEY`"
            )
        return trusted[text]
    return check_key(text)


def _file(folder: Path, name: str) -> Path:
    return folder / f"{_check_name(name)}.json"


def _pin(name: str) -> Path:
    return _folder() / _TRUSTED / _check_name(name)


def _check_name(name: str) -> str:
    if not re.fullmatch(r"\w[\w.-]{0,38}", name):
        raise UsageError(f"key name {name!r}: use letters, digits, . - and _")
    return name


def _folder() -> Path:
    """Return the folder, created if needed; raise UsageError if other users can access it."""
    folder = keys_dir()
    with contextlib.suppress(FileExistsError):
        folder.mkdir(parents=True, mode=0o700)
    (folder / _TRUSTED).mkdir(exist_ok=True, mode=0o700)
    info = folder.lstat()
    user = psutil.Process().uids().real
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != user or info.st_mode & 0o077:
        raise UsageError(
            f"the folder of keys {str(folder)!r} must be your own and private: "
            f"`chmod 700 {folder}`, or set SSD_KEYS_DIR"
        )
    return folder
