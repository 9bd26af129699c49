"""Forty prompts with tools, greedy: which calls a server recognises, and whether they are valid.

`python docs/lab/tool_calls.py http://127.0.0.1:8080 --json ours.json`. A prompt is *recognised* if
there are calls where its answer should have some and none elsewhere, *valid* if every call follows
its tool's schema, and *right* if the tools called are those of `tool-prompts.json`, in any order.
"""

import argparse
import collections
import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import openai

PROMPTS = Path(__file__).with_name("tool-prompts.json")
SHARES = ("recognised", "valid", "right")


def ask(client: openai.OpenAI, prompt: dict[str, Any], tools: dict[str, Any], tokens: int) -> Any:
    """Return the server's answer; raise APIError if it refuses."""
    create: Any = client.chat.completions.create
    functions = [{"name": name, **tools[name]} for name in prompt["tools"]]
    return create(
        model="default",
        messages=prompt["messages"],
        tools=[{"type": "function", "function": function} for function in functions],
        tool_choice=prompt.get("tool_choice", "auto"),
        parallel_tool_calls=True,
        temperature=0,
        max_tokens=tokens,
    )


def is_valid(name: str, arguments: str, tools: dict[str, Any]) -> bool:
    """Return True if the tool was offered and the arguments follow its schema."""
    try:
        jsonschema.validate(json.loads(arguments), tools[name]["parameters"])
    except (KeyError, ValueError, jsonschema.ValidationError):
        return False
    return True


def judge(prompt: dict[str, Any], answer: Any, tools: dict[str, Any]) -> dict[str, Any]:
    """Return what the answer was, and which of the three shares it counts for."""
    [choice] = answer.choices
    calls = [call.function for call in choice.message.tool_calls or []]
    names, expected = [call.name for call in calls], prompt["calls"]
    offered = {name: tools[name] for name in prompt["tools"]}
    return {
        "id": prompt["id"],
        "kind": prompt["kind"],
        "recognised": bool(calls) == bool(expected),
        "valid": all(is_valid(call.name, call.arguments, offered) for call in calls),
        "right": sorted(names) == sorted(expected) or (expected == ["any"] and bool(names)),
        "finish_reason": choice.finish_reason,
        "content": choice.message.content,
        "calls": [[call.name, call.arguments] for call in calls],
        "statistics": answer.model_extra,
    }


def main() -> None:
    """Ask all prompts and print the shares by kind."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("address")
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--only", default="", help="ids that begin with this")
    parser.add_argument("--json", type=Path, help="write every answer to this file")
    options = parser.parse_args()
    file = json.loads(PROMPTS.read_text(encoding="utf-8"))
    tools, results = file["tools"], []
    with openai.OpenAI(
        base_url=f"{options.address}/v1", api_key="none", max_retries=0, timeout=600
    ) as client:
        for prompt in file["prompts"]:
            if not prompt["id"].startswith(options.only):
                continue
            try:
                answer = ask(client, prompt, tools, options.max_tokens)
            except openai.APIError as error:
                results.append({"id": prompt["id"], "kind": prompt["kind"], "error": str(error)})
            else:
                results.append(judge(prompt, answer, tools))
            print(json.dumps(results[-1], ensure_ascii=False), file=sys.stderr)
            if options.json:
                text = json.dumps(results, ensure_ascii=False, indent=1)
                options.json.write_text(text, encoding="utf-8")
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for result in results:
        for kind in (result["kind"], "all"):
            counts[kind].update(["prompts", *(share for share in SHARES if result.get(share))])
    for kind, count in counts.items():
        print(kind, *(f"{share} {count[share]}" for share in ("prompts", *SHARES)))


if __name__ == "__main__":
    main()
