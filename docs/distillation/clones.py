"""`python clones.py FOLDER > corpus.jsonl`: a corpus from clones of public repositories in FOLDER.

Prompts, questions and passages of P3 are from self-instruct (Apache-2.0), requests for code from
GPTeacher, files from TheAlgorithms and javascript-algorithms (all MIT). The target answers; what
others answered is not used.
"""

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TEMPLATES = "self-instruct/data/finetuning/t0_train_50k/data_per_template"
_SEEDS = (
    "self-instruct/data/seed_tasks.jsonl",
    "self-instruct/human_eval/user_oriented_instructions.jsonl",
)
_CODE = "GPTeacher/Codegen/codegen-instruct.json"
_FILES = {
    "Python": ("py", "python"), "Java": ("java", "java"), "Go": ("go", "go"),
    "Rust": ("rs", "rust"), "javascript-algorithms": ("js", "javascript"),
    "TypeScript": ("ts", "typescript"),
}  # fmt: skip
_TAKEN_APART = (
    "gigaword",
    "rotten",
    "wiki_bio",
    "wiki_hop",
    "yelp",
    "trec",
    "dbpedia",
    "glue",
    "imdb",
)
"""Templates whose texts are in lower case or in pieces, or whose answers are a word."""
_READ = ("cnn_dailymail_3_0_0_sum_in", "xsum_summarize_DOC", "multi_news_summarize",
         "adversarial_qa_droberta_based", "quoref_Find", "ropes_plain_back", "duorc_SelfRC_title")  # fmt: skip
"""Those with passages."""
_SUMMARIES = ("cnn", "xsum", "samsum", "multi")
_ASKED = ("{}", "{}", "{} Explain.", "{} Answer in one sentence.", "I was wondering, {}")
_PASSAGE = 760
"""Characters of a passage at most."""
Line = dict[str, Any]


def _questions(name: str, prompts: list[str]) -> list[str]:
    if name == "glue_qqp_quora":
        return [found for prompt in prompts for found in re.findall(r'"(.+?)"', prompt)]
    if name in ("trec_trec1", "sciq_Direct_Question_Closed_Book_"):
        return [prompt.split("\n")[0].removeprefix("Q: ") for prompt in prompts]
    return prompts if name == "kilt_tasks_hotpotqa_straighforward_qa" else []


def _passages(prompt: str) -> Iterator[str]:
    for part in re.split(r"\n\n+|(?:\r\n){2,}", prompt):
        for start in range(0, len(part), _PASSAGE):
            text = part[start : start + _PASSAGE]
            # Whole sentences only.
            text = text[text.find(". ") + 2 :] if start else text
            text = text[: text.rfind(". ") + 1] if start + _PASSAGE < len(part) else text
            if len(text) > 200 and text.count(" . ") < 2:
                yield text.strip()


def _templates(folder: Path, r: random.Random) -> Iterator[Line]:
    questions, passages = set[str](), set[str]()
    for path in sorted((folder / _TEMPLATES).glob("*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()
        prompts = [json.loads(line)["prompt"].strip() for line in lines]
        questions.update(_questions(path.stem, prompts))
        if path.stem.startswith(_READ):
            passages.update(text for prompt in prompts for text in _passages(prompt))
        if not path.stem.startswith(_TAKEN_APART):
            kind = "summaries" if path.stem.startswith(_SUMMARIES) else "tasks"
            for prompt in prompts:
                if 30 < len(prompt) < 1500:
                    yield {"prompt": prompt, "category": f"real {kind}"}
    for question in sorted(questions):
        for _ in range(4):
            yield {"prompt": r.choice(_ASKED).format(question), "category": "real questions"}
    yield from ({"passage": text} for text in sorted(passages))


def _requests(folder: Path) -> Iterator[Line]:
    for one in json.loads((folder / _CODE).read_text(encoding="utf-8")):
        prompt = "\n".join(filter(None, (one["instruction"], one.get("input"))))
        yield from [{"prompt": prompt, "category": "real code"}] * 2
    for name in _SEEDS:
        for line in (folder / name).read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            given = one["instances"][0].get("input")
            prompt = "\n\n".join(filter(None, (one["instruction"], given)))
            yield from [{"prompt": prompt, "category": "real chat"}] * 12


def _files(folder: Path, r: random.Random) -> Iterator[Line]:
    for name, (ending, language) in _FILES.items():
        paths = sorted((folder / name).rglob(f"*.{ending}"))
        fitting = [path for path in paths if 300 < path.stat().st_size < 2600]
        for path in r.sample(fitting, min(500, len(fitting))):
            yield {"file": path.read_text(encoding="utf-8"), "language": language}


def main() -> None:
    """Write the corpus."""
    folder = Path(sys.argv[1])
    r = random.Random(5)  # noqa: S311  # not for secrets
    lines = [*_templates(folder, r), *_requests(folder), *_files(folder, r)]
    r.shuffle(lines)
    sys.stdout.writelines(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)


if __name__ == "__main__":
    main()
