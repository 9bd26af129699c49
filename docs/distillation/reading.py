"""Prompts that give the target something to read: made of passages that it wrote itself.

Also short questions of fact. As in `prompts.py`, nothing here comes from a public set.
"""

import random
import re
from collections.abc import Callable

from words import NAMES, PLACES, THINGS, TOPICS

Reads = Callable[[random.Random, list[str]], str]
"""(chance, passages) -> prompt."""

CITIES = [
    "Paris",
    "Rome",
    "Oslo",
    "Cairo",
    "Lima",
    "Tokyo",
    "Delhi",
    "Seoul",
    "Dublin",
    "Vienna",
    "Prague",
    "Athens",
    "Lisbon",
    "Madrid",
    "Berlin",
    "Bern",
    "Warsaw",
    "Helsinki",
    "Nairobi",
    "Lagos",
    "Boston",
    "Denver",
    "Toronto",
    "Havana",
    "Quito",
    "Hanoi",
    "Manila",
    "Perth",
    "Auckland",
    "Bergen",
    "Porto",
    "Lyon",
    "Turin",
    "Ghent",
    "Riga",
    "Zagreb",
    "Split",
    "Tunis",
    "Accra",
    "Dakar",
    "Leeds",
    "Cork",
]
COUNTRIES = [
    "France",
    "Italy",
    "Norway",
    "Egypt",
    "Peru",
    "Japan",
    "India",
    "South Korea",
    "Ireland",
    "Austria",
    "Greece",
    "Portugal",
    "Spain",
    "Germany",
    "Poland",
    "Finland",
    "Kenya",
    "Nigeria",
    "Canada",
    "Cuba",
    "Vietnam",
    "Australia",
    "New Zealand",
    "Brazil",
    "Mexico",
    "Argentina",
    "Chile",
    "Turkey",
    "Iran",
    "China",
    "Indonesia",
    "Thailand",
    "Sweden",
    "Denmark",
    "Iceland",
    "Hungary",
    "Ukraine",
    "Morocco",
    "Ethiopia",
    "South Africa",
    "the United Kingdom",
    "the United States",
    "the Netherlands",
    "Switzerland",
]
WORKS = [
    "Hamlet",
    "Don Quixote",
    "War and Peace",
    "Pride and Prejudice",
    "Moby-Dick",
    "Faust",
    "The Divine Comedy",
    "The Iliad",
    "Frankenstein",
    "Dracula",
    "1984",
    "Les Miserables",
    "Ulysses",
    "The Trial",
    "Crime and Punishment",
    "Great Expectations",
    "The Republic",
    "On the Origin of Species",
    "The Magic Flute",
    "Swan Lake",
    "The Starry Night",
    "Guernica",
    "The Mona Lisa",
    "The Four Seasons",
    "Robinson Crusoe",
    "Jane Eyre",
    "Candide",
]
PEOPLE = [
    "Marie Curie",
    "Isaac Newton",
    "Ada Lovelace",
    "Galileo Galilei",
    "Leonardo da Vinci",
    "Cleopatra",
    "Napoleon",
    "Julius Caesar",
    "Abraham Lincoln",
    "Nelson Mandela",
    "Mahatma Gandhi",
    "Albert Einstein",
    "Charles Darwin",
    "Johann Sebastian Bach",
    "Frida Kahlo",
    "Socrates",
    "Confucius",
    "Florence Nightingale",
    "Nikola Tesla",
    "Alan Turing",
    "Jane Goodall",
    "Louis Pasteur",
    "Joan of Arc",
    "Christopher Columbus",
    "Homer",
    "Aristotle",
]
PAIRS = [
    "a virus and a bacterium",
    "a lake and a pond",
    "mass and weight",
    "speed and velocity",
    "a comet and an asteroid",
    "jam and jelly",
    "a simile and a metaphor",
    "a crocodile and an alligator",
    "RAM and storage",
    "a stack and a queue",
    "a city and a town",
    "debit and credit",
    "heat and temperature",
    "an atom and a molecule",
    "fiction and non-fiction",
    "a frog and a toad",
    "stocks and bonds",
    "TCP and UDP",
    "a psychologist and a psychiatrist",
    "baking powder and baking soda",
    "a moth and a butterfly",
    "igneous and sedimentary rock",
    "socialism and communism",
    "a solicitor and a barrister",
    "an ape and a monkey",
    "a list and a tuple",
    "a comma and a semicolon",
    "an opera and a musical",
    "copper and bronze",
]
WHYS = [
    "is the sky blue",
    "do leaves change colour",
    "is the sea salty",
    "do cats purr",
    "do we dream",
    "does ice float",
    "do onions make us cry",
    "do stars twinkle",
    "does bread rise",
    "do we yawn",
    "is blood red",
    "does iron rust",
    "do birds migrate",
    "do we have leap years",
    "does the wind blow",
    "do volcanoes erupt",
    "do tides happen",
    "do airplanes fly",
    "does coffee keep us awake",
    "do mirrors swap left and right",
    "is glass transparent",
    "do magnets attract iron",
    "do we need sleep",
    "is the desert cold at night",
    "does hot air rise",
    "do bees make honey",
    "do planets orbit the sun",
    "do some metals conduct better than others",
    "does time pass slower at high speed",
    "do batteries run down",
    "does soap clean",
    "do cities form near rivers",
    "did the dinosaurs die out",
    "did Rome fall",
    "do languages change",
    "do prices rise",
]
LANGUAGES = ("French", "Spanish", "German", "Italian", "Portuguese", "Dutch", "Swedish", "Polish")

_QUESTIONS = [
    lambda r: f"Why {r.choice(WHYS)}?",
    lambda r: f"Can you explain why {_statement(r.choice(WHYS))}?",
    lambda r: f"What is the difference between {r.choice(PAIRS)}?",
    lambda r: f"Who made {r.choice(WORKS)}, and what is it about?",
    lambda r: f"Who was {r.choice(PEOPLE)}?",
    lambda r: f"What is {r.choice(PEOPLE)} known for?",
    lambda r: f"What is the capital of {r.choice(COUNTRIES)}, and what is it known for?",
    lambda r: f"Which countries border {r.choice(COUNTRIES)}?",
    lambda r: f"What language is spoken in {r.choice(COUNTRIES)}?",
    lambda r: f"When did {r.choice(TOPICS)} begin?",
    lambda r: f"How does {r.choice(TOPICS)} work?",
    lambda r: f"What is {r.choice(TOPICS)}?",
    lambda r: f"How many {r.choice(THINGS)} fit in a {r.choice(PLACES)}?",
    lambda r: f"Is it true that {r.choice(TOPICS)} has something to do with {r.choice(TOPICS)}?",
    lambda r: f"What are the main causes of {r.choice(TOPICS)}?",
    lambda r: f"Name five facts about {r.choice(COUNTRIES)}.",
    lambda r: f"What should I see in {r.choice(CITIES)}?",
    lambda r: f"What is the best time to visit {r.choice(CITIES)}, and why?",
]


def questions(r: random.Random, passages: list[str]) -> str:
    """A short question of fact."""
    del passages
    return r.choice(_QUESTIONS)(r)


def _statement(why: str) -> str:
    """The words of a question as those of a statement, nearly."""
    return re.sub(r"^(do|does|did|is) ", "", why)


def sentences(passage: str) -> list[str]:
    """The whole sentences of a passage."""
    found = re.findall(r"[A-Z][^.!?\n]{25,220}[.!?](?=\s|$)", passage)
    return [sentence.strip() for sentence in found]


def _sentence(r: random.Random, passages: list[str]) -> str:
    for _ in range(20):
        found = sentences(r.choice(passages))
        if found:
            return r.choice(found)
    return f"{r.choice(NAMES)} went to {r.choice(CITIES)} to buy {r.choice(THINGS)}."


def translation(r: random.Random, passages: list[str]) -> str:
    """A sentence or two into another language."""
    text = _sentence(r, passages)
    if r.random() < 0.4:
        a, b = r.sample(NAMES, 2)
        text = r.choice(
            [
                f"{a} asked {b} to bring the {r.choice(THINGS)} to the {r.choice(PLACES)} by noon.",
                f"The {r.choice(PLACES)} in {r.choice(CITIES)} is closed on Mondays, but {a} has a key.",
                f"We have sold {r.randint(3, 90)} {r.choice(THINGS)} since Tuesday, more than {b} expected.",
                f"Could you tell {a} that the train to {r.choice(CITIES)} leaves at {r.randint(1, 12)} o'clock?",
                f"My brother lives near the {r.choice(PLACES)} and learns about {r.choice(TOPICS)} at night.",
            ]
        )
    elif r.random() < 0.3:
        text += " " + _sentence(r, passages)
    language = r.choice(LANGUAGES[:4] if r.random() < 0.8 else LANGUAGES)
    return r.choice(
        [
            f"Translate into {language}: {text}",
            f"Translate to {language}: {text}",
            f"Translate the following into {language}.\n\n{text}",
            f'How do you say "{text}" in {language}?',
            f"Please translate this text to {language}:\n{text}",
            f"{text}\n\nTranslate the above into {language}.",
        ]
    )


def _text(r: random.Random, passages: list[str], longest: int) -> str:
    count = min(len(passages), r.randint(1, longest))
    parts = r.sample(passages, count)
    return "\n\n".join(parts)


_SUMMARISE = [
    "Summarise the following text in {n} sentences.\n\n{text}",
    "Summarize this in {n} sentences:\n\n{text}",
    "Summarize the text below.\n\n{text}",
    "Give me a short summary of this article:\n{text}",
    "{text}\n\nTL;DR",
    "{text}\n\nSum this up in one sentence.",
    "What is the main idea of the following text?\n\n{text}",
    "List the key points of this text as bullets.\n\n{text}",
    "Write a headline and a one-sentence summary for:\n\n{text}",
]
_ASK = [
    "Read the text and answer the question.\n\n{text}\n\nQuestion: what does it say about {t}?",
    "{text}\n\nAccording to the text, why does this matter?",
    "{text}\n\nWhich facts are mentioned in the passage above?",
    "Here is a passage.\n\n{text}\n\nWrite three questions about it and answer them.",
    'Quote the sentence of the following text that mentions "{word}".\n\n{text}',
    "Extract all names, places and numbers from this text as JSON.\n\n{text}",
    'Answer with words from the text only: what is said about "{word}"?\n\n{text}',
]
_REWRITE = [
    "Rewrite the following text in simpler words.\n\n{text}",
    "Make this more formal:\n\n{text}",
    "Correct the grammar and spelling of this text, and change nothing else.\n\n{text}",
    "Shorten this to half its length:\n\n{text}",
    "Continue this text:\n\n{text}",
    "Turn this into an email to a colleague:\n\n{text}",
    "Rewrite this text with {word} replaced by a synonym.\n\n{text}",
]


def _over_text(r: random.Random, passages: list[str], templates: list[str], longest: int) -> str:
    text = _text(r, passages, longest)
    words = re.findall(r"[a-z]{5,}", text) or ["it"]
    n = r.choice(["two", "two", "three", "four"])
    template = r.choice(templates)
    return template.format(text=text, n=n, t=r.choice(TOPICS), word=r.choice(words))


def summaries(r: random.Random, passages: list[str]) -> str:
    """Something to sum up."""
    return _over_text(r, passages, _SUMMARISE, 2)


def reading(r: random.Random, passages: list[str]) -> str:
    """A question about a text, or a text to rewrite."""
    return _over_text(r, passages, r.choice([_ASK, _REWRITE]), 2)


def long(r: random.Random, passages: list[str]) -> str:
    """Several texts, and something to do with them."""
    texts = [r.choice(passages) for _ in range(r.randint(3, 5))]
    if r.random() < 0.3:
        texts[r.randrange(len(texts))] = _table(r)[0]
    task = r.choice(
        [
            "Summarise each text in one sentence.",
            "What do these texts have in common?",
            "Write a short introduction to a magazine that holds these texts.",
            f"Answer with the help of the texts: what is said about {r.choice(TOPICS)}?",
            "List the topics of the texts.",
            "Repeat the second text word for word.",
            "Which text is the most useful for a beginner, and why?",
        ]
    )
    joined = "\n\n".join(texts)
    return r.choice([f"{task}\n\n{joined}", f"Read the following texts.\n\n{joined}\n\n{task}"])


def _table(r: random.Random) -> tuple[str, list[str], list[str]]:
    """A list of records, its first columns, and its lines."""
    columns: list[Callable[[], str]] = r.sample(
        [
            lambda: r.choice(CITIES),
            lambda: r.choice(THINGS),
            lambda: f"room {r.randint(1, 60)}",
            lambda: f"{r.randint(2, 95)} years old",
            lambda: f"${r.randint(5, 400)}",
            lambda: r.choice(["paid", "unpaid", "late"]),
            lambda: r.choice(["Monday", "Tuesday", "Thursday", "Friday", "Sunday"]),
            lambda: f"{r.randint(1, 12)}:{r.choice(['00', '15', '30', '45'])}",
            lambda: r.choice(["red", "blue", "green", "white"]),
            lambda: r.choice(TOPICS),
        ],
        r.randint(2, 4),
    )
    start, comma = r.choice([1, 10, 101, 500]), r.choice([", ", " | ", "; "])
    keys = r.sample(NAMES, r.randint(6, 18))
    lines = []
    for place, key in enumerate(keys):
        head = f"{start + place}: {key}" if start > 1 else f"- {key}"
        lines.append(comma.join([head, *(column() for column in columns)]))
    return "\n".join(lines), keys, lines


def retrieval(r: random.Random, passages: list[str]) -> str:
    """A list, and something to find or repeat in it."""
    table, keys, lines = _table(r)
    what = r.choice(
        ["guests", "orders", "members", "students", "deliveries", "patients", "tickets"]
    )
    name, other = r.sample(keys, 2)
    field = re.split(r", | \| |; ", r.choice(lines))[-1]
    task = r.choice(
        [
            f"Repeat the line of {name}.",
            f"Copy the lines of {name} and {other}.",
            f"Which {what} have {field}? Copy their lines.",
            f"List all {what} with {field}.",
            "Repeat the whole list in the same order.",
            "Write the list as a Markdown table.",
            "Write the list as JSON.",
            f"What does the list say about {name}?",
            f"How many {what} are there? List their names.",
            f"Repeat the first {r.randint(3, 6)} lines.",
            "Sort the list by name.",
        ]
    )
    intro = r.choice([f"Here is a list of {what}.", f"{what.capitalize()}:", "Look at this list."])
    if r.random() < 0.2:
        return f"{r.choice(passages)}\n\n{intro}\n\n{table}\n\n{task}"
    return r.choice([f"{intro}\n\n{table}\n\n{task}", f"{task}\n\n{intro}\n\n{table}"])


PASSAGES = [
    "Write a short paragraph about {t}.",
    "Write a short news report about {t} in {c}.",
    "Describe {t} in five sentences.",
    "Tell a very short story in which {n} learns about {t} in {c}.",
    "Write an encyclopedia entry of about 100 words on {t}.",
    "Write a paragraph on how {t} and {u} are connected.",
    "Write a short letter from {n} to a friend about {t}.",
    "Write a short report for the council of {c} about {t}.",
    "Write a paragraph about the history of {t} in {o}.",
    "Write a short notice about {t} at the {p} in {c}.",
    "Describe how {t} is done, step by step, in one paragraph.",
    "Write a short text about {w} by someone who dislikes it.",
    "Write a paragraph about {q} and {t}.",
]


def passage_prompt(r: random.Random) -> str:
    """What the target is asked so that it writes a passage."""
    t, u = r.sample(TOPICS, 2)
    return r.choice(PASSAGES).format(
        t=t,
        u=u,
        c=r.choice(CITIES),
        n=r.choice(NAMES),
        o=r.choice(COUNTRIES),
        p=r.choice(PLACES),
        w=r.choice(WORKS),
        q=r.choice(PEOPLE),
    )
