"""`ssd claude`, `ssd codex`: a coding agent that uses the local model."""

import contextlib
import http.client
import json
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import click
from msgspec.structs import replace

from launch.settings.flags import Command
from launch.settings.machine import extend_environment
from launch.settings.options import http_options, settings_of, stack_options
from launch.settings.settings import StackSettings
from launch.stack.session import private_stack
from launch.terminal import console
from protocol.errors import UsageError

_PROBE_S = 2.0
_NO_KEY = "none"
"""Key sent to a server without one: clients require a key."""


class AgentServer(NamedTuple):
    """Address of a gateway."""

    url: str
    key: str
    model: str


class Agent(NamedTuple):
    """A client program."""

    program: str
    environment: Callable[[AgentServer], Mapping[str, str]]
    arguments: Callable[[AgentServer], Sequence[str]]


def _claude_environment(server: AgentServer) -> dict[str, str]:
    roles = ("OPUS", "SONNET", "HAIKU")
    return {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        "ANTHROPIC_MODEL": server.model,
        **{f"ANTHROPIC_DEFAULT_{role}_MODEL": server.model for role in roles},
        "ANTHROPIC_SMALL_FAST_MODEL": server.model,
        # A long prompt may take minutes, during which pings do not count; and no other address is
        # needed.
        "API_TIMEOUT_MS": "3600000",
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": "3600000",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def _codex_arguments(server: AgentServer) -> list[str]:
    provider = {
        "name": '"ssd"',
        "base_url": json.dumps(f"{server.url}/v1"),
        "env_key": '"SSD_API_KEY"',
        "wire_api": '"responses"',
        # A long prompt may take minutes.
        "stream_idle_timeout_ms": "3600000",
    }
    fields = [f"model_providers.ssd.{name}={value}" for name, value in provider.items()]
    settings = ['model_provider="ssd"', f"model={json.dumps(server.model)}", *fields]
    return [word for setting in settings for word in ("-c", setting)]


def _no_arguments(server: AgentServer) -> list[str]:
    del server
    return []


def _codex_environment(server: AgentServer) -> dict[str, str]:
    return {"SSD_API_KEY": server.key}


CLAUDE = Agent("claude", _claude_environment, _no_arguments)
CODEX = Agent("codex", _codex_environment, _codex_arguments)


def _make_command(agent: Agent, title: str) -> click.Command:
    @click.command(agent.program, cls=Command, help=_HELP.format(title=title))
    @stack_options()
    @http_options()
    @click.option("--print-env", is_flag=True, help="Print the environment it needs, and exit.")
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def command(*, print_env: bool, arguments: tuple[str, ...], **options: Any) -> None:
        settings = settings_of(**options)
        if print_env:
            _print_environment(agent, _find_server(settings) or _describe(settings))
            return
        program = shutil.which(agent.program)
        if program is None:
            raise UsageError(
                f"the program {agent.program!r} is not installed, or not on the PATH; "
                "--print-env shows what it needs to know"
            )
        with _serve(settings) as server:
            sys.exit(_run(agent, program, server, arguments))

    return command


_HELP = """Run {title} with the local model.

Uses the server at --host and --port if one is running, otherwise starts one for as long as the
program runs. Arguments after -- go to the program.
"""


def _run(agent: Agent, program: str, server: AgentServer, arguments: Sequence[str]) -> int:
    """Run the program to its end and return its exit code; it handles Ctrl-C itself."""
    command = [program, *agent.arguments(server), *arguments]
    environment = extend_environment(agent.environment(server))
    before = signal.signal(signal.SIGINT, _leave_to_the_program)
    try:
        return subprocess.run(command, env=environment, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)


def _leave_to_the_program(number: int, frame: FrameType | None) -> None:
    """Ignore a signal; unlike SIG_IGN, a handler is not inherited by the new program."""
    del number, frame


@contextlib.contextmanager
def _serve(settings: StackSettings) -> Iterator[AgentServer]:
    """Yield the running server, or one that ends with the context."""
    if server := _find_server(settings):
        console.stderr().print(f"using the server at {server.url}", markup=False)
        yield server
        return
    private = replace(settings, http=True, port=0)
    with (
        console.stderr().status("loading the models") as status,
        private_stack(private, console.report_trouble) as supervisor,
    ):
        assert supervisor.listener is not None  # noqa: S101  # `http` is set
        server = _probe(supervisor.listener.url, settings.api_key)
        if server is None:
            raise UsageError("the server that was started does not answer")
        status.stop()
        yield server


def _find_server(settings: StackSettings) -> AgentServer | None:
    """Return the running server at the configured address, if there is one."""
    return _probe(_url(settings), settings.api_key)


def _describe(settings: StackSettings) -> AgentServer:
    """Describe the server that the settings would start."""
    return AgentServer(_url(settings), settings.api_key or _NO_KEY, "default")


def _url(settings: StackSettings) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{settings.port}"


def _probe(url: str, key: str) -> AgentServer | None:
    """Return the server at an address; None if no server of ours answers there.

    Raises:
        UsageError: it requires another key.
    """
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=_PROBE_S)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/v1/models", headers=headers)
            response = connection.getresponse()
            body = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError):
            return None
    if response.status == 401:
        raise UsageError(f"the server at {url} wants a key: set SSD_API_KEY")
    cards = body.get("data") if isinstance(body, dict) else None
    local = [card["id"] for card in cards or [] if card.get("owned_by") == "local"]
    return AgentServer(url, key or _NO_KEY, local[0]) if local else None


def _print_environment(agent: Agent, server: AgentServer) -> None:
    """Print the environment in shell syntax; a program with arguments gets a separate line."""
    for name, value in agent.environment(server).items():
        click.echo(f"export {name}={shlex.quote(value)}")
    if words := agent.arguments(server):
        click.echo(shlex.join([agent.program, *words]))


claude = _make_command(CLAUDE, "Claude Code")
codex = _make_command(CODEX, "Codex")
