"""`ssd keys`: our keys and the trusted ones, for drafters on other machines."""

import json

import click

from launch import keyring
from launch.keyring import DEFAULT_KEY
from launch.settings.flags import Group
from launch.terminal import console
from protocol.transport.curve import read_keys


@click.group("keys", cls=Group)
def command() -> None:
    """Make, show and trust keys for drafters on other machines."""


@command.command("new")
@click.argument("name", default=DEFAULT_KEY)
def new(name: str) -> None:
    """Make a key pair; the secret half stays in its file."""
    console.write(f"{keyring.make_keys(name)}\n")


@command.command("show")
@click.argument("name", default=DEFAULT_KEY)
def show_key(name: str) -> None:
    """Print your public key, which the other machine must trust."""
    console.write(f"{read_keys(keyring.own_keys(name)).public}\n")


@command.command("trust")
@click.argument("name")
@click.argument("key")
def trust(name: str, key: str) -> None:
    """Trust another machine's public key under a name."""
    keyring.trust(name, key)


@command.command("forget")
@click.argument("name")
def forget(name: str) -> None:
    """Stop trusting a machine."""
    keyring.forget(name)


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_keys(*, as_json: bool) -> None:
    """List your keys and those you trust, without secrets."""
    own_keys, trusted = keyring.list_own_keys(), keyring.list_trusted_keys()
    if as_json:
        console.write(json.dumps({"own": own_keys, "trusted": trusted}) + "\n")
        return
    for kind, names in (("own", own_keys), ("trusted", trusted)):
        for name, key in names.items():
            console.write(f"{kind:<8} {name:<20} {key}\n")
