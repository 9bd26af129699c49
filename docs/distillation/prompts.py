"""What a target is asked: questions put together from our own words by chance.

Always the same chance: conversation, sums told as stories, functions, puzzles, other languages,
and, about passages and files that the target wrote itself, those of `reading.py` and `tasks.py`.
None of them comes from a public set of prompts, so that such sets stay fit for judging a drafter.
"""

import random
import re
from collections.abc import Callable
from typing import NamedTuple

import reading
import tasks
from languages import other_languages
from words import CHAT, NAMES, PLACES, THINGS, TOPICS

Make = Callable[[random.Random], str]


def chat(r: random.Random) -> str:
    """A question about one or two topics."""
    t, u = r.sample(TOPICS, 2)
    return r.choice(CHAT).format(t=t, u=u)


def _shopping(r: random.Random) -> str:
    a, b = r.sample(NAMES, 2)
    x, y = r.sample(THINGS, 2)
    n, m, p, q = r.randint(2, 12), r.randint(2, 9), r.randint(1, 9), r.randint(2, 15)
    return r.choice(
        [
            f"{a} buys {n} {x} for ${p} each and {m} {y} for ${q} each. How much does {a} spend in total?",
            f"{a} has ${n * p + q} and buys {n} {x} at ${p} each. How much money is left?",
            f"A {r.choice(PLACES)} sells {x} for ${p} each. On Monday it sold {10 * n} of them, on Tuesday half as many and on Wednesday {m} more than on Tuesday. How much did it earn in the three days?",
            f"{a} and {b} share the cost of {n} {x} at ${p} each and {m} {y} at ${q} each. {a} pays twice as much as {b}. How much does {b} pay?",
            f"{x.capitalize()} cost ${p} each, but every second one is sold at half the price. How much does {a} pay for {2 * n} {x}?",
            f"{a} sells {x} for ${q} each. It costs ${p} to make one. How much profit does {a} make on {10 * m} {x}?",
        ]
    )


def _counting(r: random.Random) -> str:
    a, b, c = r.sample(NAMES, 3)
    x = r.choice(THINGS)
    n, m, k = r.randint(3, 40), r.randint(2, 9), r.randint(2, 6)
    return r.choice(
        [
            f"{a} has {n} {x}. {b} has {m} more than {a}, and {c} has twice as many as {b}. How many {x} do they have together?",
            f"{a} has {k} boxes with {n} {x} in each. {a} gives {m} {x} to {b}. How many are left?",
            f"There are {k * n} {x} to be shared equally by {k} children. {a} already ate {m} of hers. How many does {a} have now?",
            f"A {r.choice(PLACES)} has {k} rows of {n} {x}. One {r.choice(['third', 'half', 'quarter'])} of them are red. How many are not red?",
            f"{a} collects {n} {x} a day for {k} weeks and loses {m} of them. How many does {a} have in the end?",
            f"{a} had some {x}. {a} gave {m} to {b} and {k} to {c} and has {n} left. How many were there at first?",
            f"In a class of {k * m} children, {100 * (r.randint(1, 4)) // 5}% like {x}. How many do not?",
        ]
    )


def _time_and_work(r: random.Random) -> str:
    a, b = r.sample(NAMES, 2)
    n, m, k = r.randint(2, 12), r.randint(20, 90), r.randint(2, 9)
    return r.choice(
        [
            f"{a} drives {m} miles per hour for {n} hours, then {k * 10} miles more. How far does {a} drive?",
            f"{a} runs {n} laps of {100 * k} meters, {k} times a week. How many meters is that in {n} weeks?",
            f"{a} reads {m} pages a day. A book has {m * n + k} pages. How many days does {a} need to finish it?",
            f"{a} earns ${m} a day and works {k} days a week. {b} earns ${k * 3} an hour and works {n} hours a week. Who earns more in {n} weeks, and by how much?",
            f"A tank holds {m * n} liters. A pump fills {k} liters a minute. How long does it take to fill half of it?",
            f"{a} is {n} years older than {b}. In {k} years the sum of their ages will be {m + n}. How old is {b} now?",
            f"{a} needs {n} minutes to peel {k} potatoes. How many potatoes can {a} peel in {m} minutes?",
            f"A train leaves at {n}:15 and arrives {k} hours and {m % 60} minutes later. When does it arrive?",
            f"{a} jogs {n} miles every day except Sunday. How many miles does {a} jog in {k} weeks? If each mile burns {m} calories, how many calories does {a} burn?",
        ]
    )


def _plain_sum(r: random.Random) -> str:
    n, m, k = r.randint(2, 99), r.randint(2, 99), r.randint(2, 12)
    return r.choice(
        [
            f"What is {n} + {m} * {k}?",
            f"Compute {n * k} / {k} - {m}.",
            f"Solve for x: {k}x + {n} = {k * m + n}.",
            f"What is {5 * k}% of {10 * n}?",
            f"Simplify {k * n}/{k * m}.",
            f"Is {n * m + 1} a prime number? Explain.",
            f"The area of a rectangle is {n * k} square meters and its width is {k} meters. What is its perimeter?",
            f"If f(x) = {k}x^2 - {n}, what is f({m % 9})?",
            f"What is the average of {n}, {m} and {n + m + 3 * k}?",
        ]
    )


def maths(r: random.Random) -> str:
    """A sum, mostly told as a story."""
    return r.choices([_shopping, _counting, _time_and_work, _plain_sum], [3, 3, 3, 1])[0](r)


_LISTS = [
    ("the sum of the {p} numbers", "sum(x for x in v if {c})", "int"),
    ("the product of the {p} numbers", "__import__('math').prod(x for x in v if {c})", "int"),
    ("how many {p} numbers there are", "sum(1 for x in v if {c})", "int"),
    ("a list of the {p} numbers", "[x for x in v if {c}]", "List[int]"),
    ("the {p} numbers in ascending order", "sorted(x for x in v if {c})", "List[int]"),
    ("the {p} numbers in reverse order", "[x for x in v if {c}][::-1]", "List[int]"),
    (
        "the largest of the {p} numbers, or None if there is none",
        "max((x for x in v if {c}), default=None)",
        "Optional[int]",
    ),
    (
        "the smallest of the {p} numbers, or None if there is none",
        "min((x for x in v if {c}), default=None)",
        "Optional[int]",
    ),
    ("the squares of the {p} numbers", "[x * x for x in v if {c}]", "List[int]"),
    (
        "the {p} numbers without duplicates, in their order",
        "list(dict.fromkeys(x for x in v if {c}))",
        "List[int]",
    ),
    (
        "the running totals of the {p} numbers",
        "list(__import__('itertools').accumulate(x for x in v if {c}))",
        "List[int]",
    ),
    ("the positions of the {p} numbers", "[i for i, x in enumerate(v) if {c}]", "List[int]"),
]
_KINDS = [
    ("even", "x % 2 == 0"),
    ("odd", "x % 2 == 1"),
    ("positive", "x > 0"),
    ("negative", "x < 0"),
    ("non-zero", "x != 0"),
    ("two-digit", "9 < abs(x) < 100"),
    ("one-digit", "abs(x) < 10"),
    ("prime", "x > 1 and all(x % d for d in range(2, x))"),
    ("multiple-of-three", "x % 3 == 0"),
    ("greater-than-ten", "x > 10"),
    ("perfect-square", "x >= 0 and int(x ** .5) ** 2 == x"),
]
_STRINGS = [
    ("the number of {p} in the string", "sum(1 for x in v if {c})", "int"),
    ("the string without its {p}", "''.join(x for x in v if not ({c}))", "str"),
    ("only the {p} of the string", "''.join(x for x in v if {c})", "str"),
    ("the string with its {p} doubled", "''.join(x * 2 if {c} else x for x in v)", "str"),
    ("the string with its {p} replaced by a star", "''.join('*' if {c} else x for x in v)", "str"),
    ("the positions of the {p} in the string", "[i for i, x in enumerate(v) if {c}]", "List[int]"),
    ("True if the string has any {p}", "any({c} for x in v)", "bool"),
    ("the string reversed, without its {p}", "''.join(x for x in reversed(v) if not ({c}))", "str"),
    (
        "how often each of the {p} occurs",
        "dict(__import__('collections').Counter(x for x in v if {c}))",
        "Dict[str, int]",
    ),
    (
        "the words that contain no {p}",
        "[w for w in v.split() if not any({c} for x in w)]",
        "List[str]",
    ),
]
_CHARACTERS = [
    ("vowels", "x.lower() in 'aeiou'"),
    ("digits", "x.isdigit()"),
    ("uppercase letters", "x.isupper()"),
    ("lowercase letters", "x.islower()"),
    ("spaces", "x == ' '"),
    ("letters", "x.isalpha()"),
    ("consonants", "x.isalpha() and x.lower() not in 'aeiou'"),
    ("punctuation marks", "x in '.,;:!?'"),
]
_WORDS = [
    "red",
    "Blue",
    "cat7",
    "dog",
    "Tree",
    "42",
    "house!",
    "sky,",
    "moon",
    "Lamp",
    "x9",
    "River",
    "stone?",
    "Bird",
]


class Function(NamedTuple):
    """A function that could be asked for."""

    name: str
    argument: str
    takes: str
    goal: str
    gives: str
    examples: str


def code(r: random.Random) -> str:
    """A Python function to complete, with examples that are true, or to write."""
    of_list = r.random() < 0.5
    goal, formula, result = r.choice(_LISTS if of_list else _STRINGS)
    kind, test = r.choice(_KINDS if of_list else _CHARACTERS)
    goal, formula = goal.format(p=kind), formula.format(c=test)
    names = ["numbers", "values", "lst", "nums"] if of_list else ["text", "s", "string", "sentence"]
    argument = r.choice(names)
    words = [w for w in re.findall(r"\w+", goal) if w not in ("the", "a", "of", "in", "its")]
    name = "_".join(w.lower() for w in words[: r.randint(2, 4)])
    examples = "".join(_example(r, name, formula, of_list=of_list) for _ in range(r.randint(1, 3)))
    takes = "List[int]" if of_list else "str"
    function = Function(name, argument, takes, goal, result, examples)
    return r.choice([_completion, _completion, _request])(r, function)


def _example(r: random.Random, name: str, formula: str, *, of_list: bool) -> str:
    numbers = [r.randint(-12, 40) for _ in range(r.randint(3, 6))]
    value = numbers if of_list else " ".join(r.sample(_WORDS, r.randint(1, 4)))
    found = eval(formula, {"v": value})  # noqa: S307  # our own formulas, above
    return f"    >>> {name}({value!r})\n    {found!r}\n"


def _completion(r: random.Random, f: Function) -> str:
    used = [part for part in ("List", "Optional", "Dict") if part in f.takes + f.gives]
    imports = f"from typing import {', '.join(used)}\n\n\n" if used else ""
    opening = r.choice(
        [
            f"Given {f.argument}, return {f.goal}.",
            f"Return {f.goal}.",
            f"This function returns {f.goal}.",
        ]
    )
    return (
        "Complete the following Python function:\n```python\n"
        f"{imports}def {f.name}({f.argument}: {f.takes}) -> {f.gives}:\n"
        f'    """ {opening}\n{f.examples}    """\n```'
    )


def _request(r: random.Random, f: Function) -> str:
    what = "a string" if f.takes == "str" else "a list of integers"
    language = r.choice(["Python", "JavaScript", "C", "Java", "Go"])
    return r.choice(
        [
            f"Write a Python function `{f.name}` that takes {what} and returns {f.goal}.",
            f"How do I get {f.goal} in Python, given {what}? Show a function with an example.",
            f"Write a function in {language} that takes {what} and returns {f.goal}. Add a short explanation.",
            f"Write a Python function that returns {f.goal}, and a few unit tests for it.",
            f"Refactor this into one line of Python: a loop that goes over {what} and collects {f.goal}.",
        ]
    )


SHARES: dict[str, float] = {
    "chat": 0.14,
    "code": 0.09,
    "programs": 0.08,
    "maths": 0.08,
    "reasoning": 0.06,
    "questions": 0.09,
    "languages": 0.12,
    "data": 0.02,
    "translation": 0.06,
    "summaries": 0.06,
    "reading": 0.03,
    "retrieval": 0.04,
    "long": 0.02,
    "edits": 0.06,
    "about code": 0.03,
    "tools": 0.04,
}
"""Kinds of prompts. The shorter an answer, the more prompts its kind takes."""
_OWN: dict[str, Make] = {
    "chat": chat,
    "code": code,
    "maths": maths,
    "programs": tasks.programs,
    "reasoning": tasks.reasoning,
    "languages": other_languages,
    "data": tasks.data,
}
_READING: dict[str, reading.Reads] = {
    "questions": reading.questions,
    "translation": reading.translation,
    "summaries": reading.summaries,
    "reading": reading.reading,
    "retrieval": reading.retrieval,
    "long": reading.long,
}
_FILES: dict[str, tasks.Writes] = {"edits": tasks.edits, "about code": tasks.about_code}


class Sources(NamedTuple):
    """What the target wrote to be read."""

    passages: list[str]
    files: list[tasks.File]


class Prompt(NamedTuple):
    """One prompt and its kind."""

    prompt: str | tasks.Conversation
    category: str


def make_prompts(count: int, sources: Sources, seed: int, *, has_tools: bool) -> list[Prompt]:
    """Different prompts; those that need something to read only if it is there."""
    r = random.Random(seed)  # noqa: S311  # not for secrets
    lacking = set() if sources.passages else set(_READING)
    lacking |= set() if sources.files else set(_FILES)
    lacking |= set() if has_tools else {"tools"}
    shares = {name: share for name, share in SHARES.items() if name not in lacking}
    names, weights = list(shares), list(shares.values())
    seen: set[str] = set()
    found: list[Prompt] = []
    for _ in range(20 * count):
        if len(found) == count:
            break
        category = r.choices(names, weights)[0]
        prompt = _make(r, category, sources)
        if str(prompt) not in seen:
            seen.add(str(prompt))
            found.append(Prompt(prompt, category))
    return found


def _make(r: random.Random, category: str, sources: Sources) -> str | tasks.Conversation:
    if category == "tools":
        return tasks.tools(r, sources.files)
    if category in _OWN:
        return _OWN[category](r)
    if category in _FILES:
        return _FILES[category](r, sources.files)
    return _READING[category](r, sources.passages)
