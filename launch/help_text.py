"""The common part of every command's `--help`: examples, and texts for shared flags.

Kept in one place for consistency. A command's own help text, where it has one, is kept.
"""

from collections.abc import Iterator

import click

_SCREEN = 78

_EXAMPLES: dict[str, list[tuple[str, str]]] = {
    "": [
        ("ssd demo", "what it gains on this machine, in four minutes"),
        ('ssd generate "Why is the sky blue?" --stats', "an answer, and what it cost"),
        ("ssd serve", "OpenAI's and Anthropic's HTTP APIs"),
        ("ssd top", "watch a running stack"),
    ],
    "bench": [
        ("ssd bench --limit 3", "three built-in prompts, all modes"),
        ("ssd bench --prompts FILE.jsonl --json runs.json", "your own prompts, all runs in a file"),
    ],
    "chat": [
        ("ssd chat", "with the default pair"),
        ("ssd chat --show-draft --temp 0.7", "tokens coloured by where they came from"),
    ],
    "claude": [
        ("ssd claude", "Claude Code with the default pair"),
        ("ssd claude -- -p 'What is in this folder?'", "arguments of the program's own"),
        ('eval "$(ssd claude --print-env)"', "for a program that is started another way"),
    ],
    "codex": [
        ("ssd codex", "Codex with the default pair"),
        ("ssd codex -- exec 'What is in this folder?'", "arguments of the program's own"),
    ],
    "completion": [
        ('eval "$(ssd completion bash)"', "in ~/.bashrc"),
        ('eval "$(ssd completion zsh)"', "in ~/.zshrc, after compinit"),
        ("ssd completion fish > ~/.config/fish/completions/ssd.fish", "once"),
    ],
    "convert": [("ssd convert --model MODEL --target LARGER", "a drafter for CoreML")],
    "demo": [
        ("ssd demo", "four prompts, twice each"),
        ("ssd demo --small", "with the default pair: 93 MB, not 1.1 GB"),
        ("ssd demo --stats", "with the statistics of each answer"),
    ],
    "distill": [
        ("ssd distill --target MODEL --out my-drafter --minutes 20", "train a drafter"),
        ("ssd distill --evaluate my-drafter --target MODEL --prompts FILE.jsonl", "evaluate it"),
    ],
    "doctor": [
        ("ssd doctor", "this machine and the default pair"),
        ("ssd doctor --model MODEL --draft-model SMALLER --json", "your own pair"),
    ],
    "draft-server": [
        ("ssd draft-server --stdio", "the message protocol"),
        ("ssd draft-server --stdio --lines", "the line protocol, readable and typeable"),
        ("ssd draft-server --listen tcp://0.0.0.0:7070 --trust laptop", "for another machine"),
    ],
    "generate": [
        ('ssd generate "Why is the sky blue?" --stats', "an answer, and what it cost"),
        ("ssd generate -p - --temp 0.7 --seed 7 < question.txt", "from standard input"),
        ("ssd generate --prompts FILE.jsonl --json", "one JSON object per prompt"),
        ('ssd generate "Tell me a story" --show-draft', "coloured by origin"),
    ],
    "keys": [
        ("ssd keys new", "once on each of two machines"),
        ("ssd keys show", "the public key for the other one"),
        ("ssd keys trust studio KEY", "on the other one: KEY is what `show` printed"),
    ],
    "keys forget": [("ssd keys forget studio", "it may no longer connect")],
    "keys list": [("ssd keys list", "your keys, and those you trust")],
    "keys new": [("ssd keys new", "a key pair named default")],
    "keys show": [("ssd keys show", "the public half")],
    "keys trust": [("ssd keys trust studio KEY", "KEY is what `ssd keys show` prints there")],
    "launch": [
        ("ssd launch", "the default pair; `ssd generate` attaches to it"),
        ("ssd launch --model MODEL --draft-model SMALLER --http", "your own pair, with HTTP"),
    ],
    "load": [("ssd load --streams 1,4 --requests 8", "one request at a time, then four")],
    "logs": [("ssd logs", "of the running stack")],
    "mac-check": [("ssd mac-check", "with the default drafter, once converted")],
    "models": [
        ("ssd models recommend --purpose code", "pairs that fit this machine"),
        ("ssd models pull mlx-community/Qwen3-8B-4bit", "fetch a model from the hub"),
        ("ssd models list", "models on this machine, and their pairs"),
    ],
    "models rm": [("ssd models rm my-model", "its name, or its folder in the cache")],
    "models add": [("ssd models add default", "downloads 93 MB")],
    "models inspect": [
        ("ssd models inspect ./my-model", "a folder"),
        ("ssd models inspect smollm2-135m-instruct --json", "a model in the cache"),
    ],
    "models list": [
        ("ssd models list", "models, and pairs that share a tokenizer"),
        ("ssd models list --json", "the same, for scripts"),
    ],
    "models pull": [("ssd models pull mlx-community/Qwen3-8B-4bit", "downloads what is missing")],
    "models recommend": [
        ("ssd models recommend", "for this machine"),
        ("ssd models recommend --memory 64 --purpose chat", "for another"),
    ],
    "serve": [
        ("ssd serve", "on 127.0.0.1:8080"),
        ("ssd serve --host 0.0.0.0 --port 9000", "reachable for others: needs SSD_API_KEY"),
        ("ssd serve --models models.toml", "several models, loaded on demand"),
        ("ssd serve --prompt-cache-file FILE", "keep the prefix cache over restarts"),
    ],
    "simulate": [
        ("ssd simulate --preset m4-ane", "a device you do not have"),
        ("ssd simulate --preset m4-ane --sweep --json", "every fixed K and B as well"),
    ],
    "swap-drafter": [
        ("ssd swap-drafter --draft-backend none", "prompt lookup, no draft model"),
        ("ssd swap-drafter --draft-backend mlx --draft-model MODEL", "another model"),
    ],
    "top": [
        ("ssd top", "the stack of `ssd launch` or `ssd serve`"),
        ("ssd top --name work", "another stack"),
        ("ssd top --once --json", "one frame, for scripts"),
    ],
}

_WORDS = {
    "--backend": "What drafts: a model, a head or a converted model.",
    "--draft-backend": "What drafts; auto: mlx with a draft model, else ngram.",
    "--max-tokens": "Longest answer in tokens.",
    "--min-p": "Keep tokens at least this likely relative to the best; 0 is off.",
    "--minutes": "Duration in minutes.",
    "--modes": "Modes to compare, comma-separated.",
    "--prefill-step-size": "Most prompt tokens per prefill chunk.",
    "--repeats": "Measurements of each.",
    "--requests": "Requests per row of the table.",
    "--seconds": "Duration in seconds.",
    "--seed": "Same seed, same result.",
    "--top-k": "Keep the N most likely tokens; 0 is off.",
    "--top-p": "Keep the most likely tokens with this total probability; 1 is off.",
}

_LAST = """

\b
Settings: flag, else SSD_* variable, else ssd.toml, else default.
Exit codes: 2 usage, 3 model, 4 runtime, 5 losslessness, 6 conversion,
130 interrupted."""


def complete(command: click.Command, name: str) -> None:
    """Add examples to the command of this name, and a text to each flag without one."""
    if name in _EXAMPLES and not command.epilog:
        command.epilog = _format_examples(_EXAMPLES[name]) + ("" if name else _LAST)
    for option in command.params:
        if isinstance(option, click.Option) and not option.help:
            option.help = next((_WORDS[o] for o in option.opts if o in _WORDS), option.help)


def commands(group: click.Command, above: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield all commands with the words to type for them, including those in groups."""
    if not isinstance(group, click.Group):
        return
    context = click.Context(group)
    for name in group.list_commands(context):
        if (command := group.get_command(context, name)) is not None:
            complete(command, f"{above}{name}")
            yield f"{above}{name}", command
            yield from commands(command, f"{above}{name} ")


def _format_examples(pairs: list[tuple[str, str]]) -> str:
    """Format examples as an epilog, with descriptions on the right where there is room."""
    width = max(len(command) for command, _ in pairs)
    lines = [f"  {command:<{width}}  {what}" for command, what in pairs]
    if max(len(line) for line in lines) > _SCREEN:
        lines = [f"  {command}\n      {what}" for command, what in pairs]
    # \b keeps click from joining the lines.
    return "\b\nExamples:\n" + "\n".join(lines)
