"""`--help` of every verb, and what shells are told to complete."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from launch.cli import cli
from launch.help_text import commands

SHELLS = ["bash", "zsh", "fish"]


VERBS = dict(commands(cli))


def help_of(verb: str) -> str:
    result = CliRunner().invoke(cli, [*verb.split(), "--help"], terminal_width=80)
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_help_says_what_and_shows_how(verb: str) -> None:
    """A sentence first, examples last, and nothing wider than a screen."""
    page = help_of(verb)
    assert f"Usage: cli {verb}" in page
    first = (VERBS[verb].help or "").split("\n\n")[0]
    assert first.endswith((".", "?")), f"`ssd {verb}` needs a docstring: one whole sentence"
    assert "Examples:" in page, f"`ssd {verb}` needs examples in launch/help_text.py"
    assert [line for line in page.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_explained(verb: str) -> None:
    """No flag without a word about it."""
    options = [p for p in VERBS[verb].params if isinstance(p, click.Option)]
    mute = [option.opts for option in options if not option.help]
    assert mute == [], "say it where the option is, or in launch/help_text.py"


EXAMPLES = [
    line.strip()
    for verb in VERBS
    for line in (VERBS[verb].epilog or "").splitlines()
    if line.startswith("  ssd ")
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_can_be_typed(example: str) -> None:
    """Each example's flags and arguments are those that its verb takes."""
    words = shlex.split(re.split(r"  +| [<>|] ", example)[0])[1:]
    command: click.Command = cli
    context = click.Context(cli, info_name="ssd")
    while isinstance(command, click.Group):
        name = words.pop(0)
        if name in {"--help", "--version"}:
            return
        found = command.get_command(context, name)
        assert found is not None, f"there is no verb {name!r}"
        command = found
    parsed = command.make_context("ssd", words, parent=context)
    assert parsed.args == []


# ---------------------------------------------------------------- completion


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_scripts(shell: str) -> None:
    """Each shell gets a script of its own, for our program."""
    result = CliRunner().invoke(cli, ["completion", shell])
    assert result.exit_code == 0, result.stderr
    assert "_SSD_COMPLETE" in result.stdout
    assert f"{shell}_complete" in result.stdout


@pytest.mark.processes
def test_bash_completes(tmp_path: Path) -> None:
    """A real bash that has read the script is offered verbs, flags and choices."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    program = tmp_path / "ssd"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m launch.cli "$@"\n')
    program.chmod(0o755)
    script = f"""
        export PATH={shlex.quote(str(tmp_path))}:$PATH
        eval "$(ssd completion bash)"
        offer() {{
            COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
            _ssd_completion ssd; echo "${{COMPREPLY[@]}}"
        }}
        offer ssd mod
        offer ssd models re
        offer ssd top --on
        offer ssd generate --mode s
    """
    done = subprocess.run(
        [bash, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines() == ["models", "recommend", "--once", "sd ssd"], done.stderr
