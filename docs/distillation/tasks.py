"""Prompts of work: files to edit and to read, programs in several languages, tools, reasoning.

The files are the target's own, written for `file_prompt`. As in `prompts.py`, nothing here comes
from a public set.
"""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from reading import CITIES
from words import NAMES, PLACES, THINGS, TOPICS

Message = dict[str, Any]


class File(NamedTuple):
    """A file that the target wrote."""

    language: str
    """As after a fence."""
    text: str


PROGRAMMING = (
    "python",
    "javascript",
    "typescript",
    "java",
    "c",
    "cpp",
    "go",
    "rust",
    "sql",
    "bash",
)
_ENDINGS = dict(zip(PROGRAMMING, ("py", "js", "ts", "java", "c", "cpp", "go", "rs", "sql", "sh"), strict=True))  # fmt: skip
_OTHER = (*PROGRAMMING, "html", "css", "yaml", "json", "markdown", "ruby", "php", "csharp")
_PROGRAMS = [
    "keeps an inventory of {x} for a {p}",
    "books rooms in a {p}",
    "counts words in a text file",
    "parses a CSV file of {x} and sums a column",
    "implements a least recently used cache",
    "is a small command-line to-do list",
    "computes shipping costs for {x}",
    "validates user input for a registration form",
    "is a bank account with deposits and withdrawals",
    "implements a stack and a queue",
    "finds the shortest path in a grid",
    "converts temperatures and lengths",
    "is a rate limiter",
    "reads a configuration file with defaults",
    "logs messages with levels to a file",
    "schedules tasks by priority",
    "is a binary search tree",
    "formats dates and durations",
    "retries a failing request with backoff",
    "plays a guessing game",
    "matches {x} to customers",
    "simulates a queue at a {p}",
    "grades the answers of a quiz on {t}",
    "is a matrix class with multiplication",
    "merges two sorted lists and removes duplicates",
    "tokenises arithmetic expressions and evaluates them",
    "watches a folder and renames new files",
    "serves a list of {x} over HTTP",
]
_NAMES = ("utils", "main", "service", "store", "parser", "app", "handler", "helpers", "models")


def _fill(r: random.Random, text: str) -> str:
    return text.format(
        t=r.choice(TOPICS), x=r.choice(THINGS), p=r.choice(PLACES), n=r.choice(NAMES), c=r.choice(CITIES)
    )  # fmt: skip


def file_prompt(r: random.Random) -> str:
    """What the target is asked so that it writes a file."""
    language = r.choice(_OTHER) if r.random() < 0.3 else r.choice(PROGRAMMING)
    what = _fill(r, r.choice(_PROGRAMS))
    size = r.choice(["about 15", "about 25", "about 40"])
    return f"Write a file in {language}, {size} lines, that {what}. Answer with the code only."


def code_of(answer: str) -> File | None:
    """Return the first fenced block of an answer, if it is whole and not tiny."""
    parts = answer.split("```")
    if len(parts) < 3:
        return None
    language, _, text = parts[1].partition("\n")
    return File(language.strip(), text) if 120 < len(text) < 2400 else None


_EDITS = [
    "Rename {a} to {b} everywhere.",
    "Add a docstring or comment to every function.",
    "Add type annotations.",
    "Add error handling for bad input.",
    "Add a function that prints a summary, and change nothing else.",
    "Replace the magic numbers by named constants.",
    "Fix any bugs that you find.",
    "Change all messages to German.",
    "Make it log each call.",
    "Remove all comments.",
    "Use double quotes for all strings.",
    "Add an option to write the result to a file.",
    "Split the longest function in two.",
    "Convert the names to snake_case.",
    "Add a maximum of {k} entries.",
    "Change the default to {k}.",
    "Sort the output by name.",
    "Add a command-line flag --verbose.",
    "Make it return early instead of nesting conditions.",
    "Add a test at the end of the file.",
]
_RETURNS = [
    "Return the whole file.",
    "Answer with the complete new file.",
    "Output the full updated code, nothing else.",
    "Show the changed file.",
    "",
]
_QUESTIONS = [
    "What does this code do? Explain it line by line.",
    "Is there a bug in this code?",
    "Write unit tests for this code.",
    "Review this code and suggest improvements.",
    "Translate this code to {l}.",
    "What is the time complexity of this code?",
    "Write a README for this file.",
    "Which functions does this file define? List name and purpose.",
    "Show a unified diff that makes the code safer.",
    "Write a commit message for adding this file.",
    "Continue this file with one more function.",
]


def _shown(r: random.Random, file: File) -> str:
    name = f"{r.choice(_NAMES)}.{_ENDINGS.get(file.language, file.language or 'txt')}"
    intro = r.choice([f"Here is `{name}`:", f"{name}", "This is my file.", "Given this code:", ""])
    return f"{intro}\n\n```{file.language}\n{file.text.rstrip()}\n```".strip()


def edits(r: random.Random, files: list[File]) -> str:
    """A file to be written again with a change."""
    file = r.choice(files)
    words = [w for w in file.text.replace("(", " ").split() if w.isidentifier() and len(w) > 4]
    old = r.choice(words or ["value"])
    task = r.choice(_EDITS).format(
        a=f"`{old}`", b=f"`{r.choice(_NAMES)}_{old}`", k=r.randint(5, 500)
    )
    if r.random() < 0.25:
        task += " " + r.choice(_EDITS[1:12])
    order = [_shown(r, file), f"{task} {r.choice(_RETURNS)}".strip()]
    return "\n\n".join(order if r.random() < 0.6 else order[::-1])


def about_code(r: random.Random, files: list[File]) -> str:
    """A question on a file."""
    question = r.choice(_QUESTIONS).format(l=r.choice(PROGRAMMING))
    return f"{_shown(r, r.choice(files))}\n\n{question}"


def programs(r: random.Random) -> str:
    """A program to write, in one of several languages."""
    what, language = _fill(r, r.choice(_PROGRAMS)), r.choice(_OTHER[: r.choice([3, 10, 18])])
    return r.choice(
        [
            f"Write a {language} program that {what}.",
            f"I need {language} code that {what}. Keep it simple and explain the main parts.",
            f"Create a class in {language} that {what}, with an example of its use.",
            f"How would you structure a {language} project that {what}?",
            f"Show me the smallest {language} example that {what}.",
            f"Implement something in {language} that {what}. Handle errors.",
        ]
    )


_PUZZLES = [
    "{a} is taller than {b}. {b} is taller than {c}. {d} is shorter than {c}. Who is the second tallest?",
    "Three boxes are labelled {x}, {y} and mixed. Every label is wrong. You may take one thing from one box. How do you find out what is in each?",
    "{a}, {b} and {c} each own one pet: a cat, a dog or a fish. {a} does not own the cat. {b} owns neither the cat nor the dog. Who owns what?",
    "If all {x} are {y} and some {y} are red, are some {x} red?",
    "{a} says {b} lies. {b} says {c} lies. {c} says both lie. Who tells the truth?",
    "A shop sells {x} in packs of {n} and {m}. Which numbers of {x} cannot be bought exactly?",
    "Today is {day}. Which day of the week is it in {k} days?",
    "What comes next: {n}, {n2}, {n3}, {n4}? Explain.",
    "{a} leaves {e} at 8:00 at {k} km/h, {b} follows at 9:00 at {k2} km/h. When does {b} catch up?",
    "How many ways are there to choose 2 of {n} {x}? Show your steps.",
    "There are {n} {x} on a table. You take away {m}. How many do you have? Think carefully.",
    "A clock shows {n}:15. What is the angle between its hands?",
    "{a} must cross a river with a wolf, a goat and a cabbage. The boat holds {a} and one of them. What is the shortest plan?",
    "Plan the order of these tasks: {a} needs {x} before {y}, {y} before {z}, and {z} takes {n} hours. When must {a} start to finish at 18:00?",
]  # fmt: skip
_THINK = ["", "", " Think step by step.", " Explain your reasoning.", " Give the answer first, then the reason.", " Let's work this out carefully."]  # fmt: skip


def reasoning(r: random.Random) -> str:
    """A puzzle, to be thought about."""
    a, b, c, d = r.sample(NAMES, 4)
    x, y, z = r.sample(THINGS, 3)
    n, step, k = r.randint(3, 11), r.randint(2, 9), r.randint(20, 90)
    text = r.choice(_PUZZLES).format(
        a=a, b=b, c=c, d=d, x=x, y=y, z=z, n=n, m=n - 2, k=k, k2=k + 15, e=r.choice(CITIES),
        n2=n + step, n3=n + 2 * step, n4=n + 3 * step, day=r.choice(["Monday", "Friday", "Sunday"]),
    )  # fmt: skip
    return text + r.choice(_THINK)


# ---------------------------------------------------------------- tools

_PARAMETERS: dict[str, tuple[str, str]] = {
    "city": ("string", "Name of the city"),
    "path": ("string", "Path of the file"),
    "query": ("string", "What to look for"),
    "date": ("string", "Date as YYYY-MM-DD"),
    "amount": ("number", "The amount"),
    "currency": ("string", "Three-letter code"),
    "limit": ("integer", "Most results"),
    "command": ("string", "The command to run"),
    "content": ("string", "The text to write"),
    "recipient": ("string", "Who gets it"),
    "old_text": ("string", "Text to replace, exactly"),
    "new_text": ("string", "What replaces it"),
    "table": ("string", "Name of the table"),
}
_TOOLS: list[tuple[str, str, list[str], list[str]]] = [
    ("get_weather", "Get the weather in a city.", ["city", "date"], ["What is the weather in {c}?", "Do I need an umbrella in {c} on 2025-05-{k}?"]),
    ("read_file", "Read a text file.", ["path"], ["What is in src/{f}.py?", "Summarise docs/{f}.md.", "Open {f}.json and tell me the version."]),
    ("write_file", "Write a file.", ["path", "content"], ["Create {f}.py with a function that adds two numbers.", "Write a haiku about {t} into {f}.txt."]),
    ("edit_file", "Replace text in a file.", ["path", "old_text", "new_text"], ["In {f}.py, rename the variable total to sum.", "Change 'debug = True' to False in settings/{f}.py."]),
    ("run_command", "Run a shell command.", ["command"], ["Run the tests.", "How many lines does {f}.py have?", "List all Python files here."]),
    ("search_web", "Search the web.", ["query", "limit"], ["Find three recent articles about {t}.", "Who invented {t}?"]),
    ("search_code", "Search the repository.", ["query", "path"], ["Where is the class {n}Store defined?", "Find all uses of parse_{f}."]),
    ("convert_currency", "Convert an amount of money.", ["amount", "currency"], ["How much is {k} dollars in euros?", "Convert {k}50 yen to pounds."]),
    ("send_email", "Send an email.", ["recipient", "content"], ["Tell {n} that the meeting at the {p} is moved to Friday.", "Email {n} a short thank-you note."]),
    ("query_database", "Run a query on a table.", ["table", "query", "limit"], ["Which {x} sold best in {c}?", "List the ten newest orders of {n}."]),
    ("create_event", "Add an event to the calendar.", ["date", "content"], ["Plan lunch with {n} on 2025-06-{k}.", "Put the visit to the {p} into my calendar for 2025-07-{k}."]),
]  # fmt: skip
_SYSTEMS = [
    "",
    "",
    "You are a helpful assistant.",
    "You are a coding agent. Use the tools; be brief.",
    "You are an assistant in a terminal. Call one tool at a time.",
]
_RESULTS = {
    "get_weather": '{{"city": "{c}", "temperature": {k}, "sky": "light rain"}}',
    "read_file": "{text}",
    "run_command": "{k} passed, 1 failed in 2.{k}s",
    "search_web": '[{{"title": "A short history of {t}", "url": "https://example.org/{k}"}}]',
    "search_code": "src/{f}.py:{k}: class {n}Store:\nsrc/main.py:12: from {f} import {n}Store",
    "convert_currency": '{{"amount": {k}.40}}',
    "query_database": '[{{"name": "{x}", "sold": {k}}}, {{"name": "{p} pass", "sold": 7}}]',
}
_ARGUMENTS = {
    "city": "{c}",
    "path": "src/{f}.py",
    "query": "{t}",
    "date": "2025-06-{k}",
    "amount": "{k}",
    "currency": "EUR",
    "command": "pytest -q",
    "content": "A note on {t} for {n}",
    "recipient": "{n}",
    "table": "{x}",
    "limit": "{k}",
    "old_text": "total = {k}",
    "new_text": "sum = {k}",
}
_DONE = '{{"ok": true}}'


class Conversation(NamedTuple):
    """Messages and tools for the chat template."""

    messages: list[Message]
    tools: list[dict[str, Any]]


def _tool(name: str, text: str, parameters: list[str]) -> dict[str, Any]:
    properties = {
        p: dict(zip(("type", "description"), _PARAMETERS[p], strict=True)) for p in parameters
    }
    schema = {"type": "object", "properties": properties, "required": parameters[:1]}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}  # fmt: skip


def tools(r: random.Random, files: list[File]) -> Conversation:
    """A question with tools at hand; in two of five, one has answered already."""
    chosen = r.sample(_TOOLS, r.randint(1, 5))
    name, _, parameters, asks = r.choice(chosen)
    file = r.choice(files) if files else File("txt", "version = 2")
    values = {
        "c": r.choice(CITIES), "t": r.choice(TOPICS), "n": r.choice(NAMES), "p": r.choice(PLACES),
        "x": r.choice(THINGS), "f": r.choice(_NAMES), "k": r.randint(10, 28), "text": file.text,
    }  # fmt: skip
    system, ask = r.choice(_SYSTEMS), r.choice(asks).format(**values)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": ask})
    if r.random() < 0.4:
        arguments = {p: _ARGUMENTS[p].format(**values) for p in parameters[:2]}
        call = {
            "type": "function",
            "id": "call_1",
            "function": {"name": name, "arguments": arguments},
        }
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        result = _RESULTS.get(name, _DONE).format(**values)
        messages.append({"role": "tool", "content": result, "tool_call_id": "call_1"})
    return Conversation(messages, [_tool(*one[:3]) for one in chosen])


def data(r: random.Random) -> str:
    """Structured text to write or to convert."""
    rows = [{"name": n, "thing": r.choice(THINGS), "count": r.randint(1, 99)} for n in r.sample(NAMES, r.randint(3, 7))]  # fmt: skip
    task = r.choice(["YAML", "a CSV file", "a Markdown table", "XML", "SQL INSERT statements", "a Python list of tuples", "a TypeScript array with an interface"])  # fmt: skip
    return f"Convert this JSON to {task}.\n\n{json.dumps(rows, indent=r.choice([None, 2]))}"


Writes = Callable[[random.Random, list[File]], str]
