"""Grammars of answers that must follow a schema, call a function, or may do either.

Where both are possible, calls use the format of the model's family. Thoughts may come first if the
client asks for them.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from protocol.decoding.grammar import check_size, json_grammar, json_rule
from services.gateway.body import check_free_form
from services.gateway.errors import refuse_value
from services.gateway.template import ModelText
from services.gateway.tools.calls import CALL_END, CALL_START, ToolFunction
from services.gateway.tools.formats import find_tool_format
from services.gateway.tools.schemas import close_objects, describe_arguments
from services.gateway.transcript import AnswerFormat, AnswerGrammar

_ANY = r"/(?s:.*)/"
_BARE_CALL = re.compile(r'\{"name": [^{}\n]*"parameters": ')
"""Matches a template's instruction to write a call as a bare JSON object."""


class GrammarWriter:
    """Writes grammars for one model.

    Args:
        text: the model's template and tokens.
        form: how it writes thoughts and calls.
    """

    def __init__(self, text: ModelText, form: AnswerFormat) -> None:
        self._text = text
        self._form = form

    def write(
        self,
        functions: Sequence[ToolFunction],
        schema: dict[str, Any] | None,
        *,
        must_call: bool,
        one_call: bool,
        opened: bool | None,
    ) -> AnswerGrammar:
        """Return the grammar of an answer.

        Args:
            functions: those that may be called.
            schema: schema of the answer unless it calls; None allows any text.
            must_call: True if it has to be a call.
            one_call: True to allow a single call only.
            opened: True if the prompt ends within a thought; None if there are no thoughts.

        Raises:
            ApiError: there is nothing to call, or a schema is too large.
            UsageError: the grammar is too large.
        """
        for function in functions:
            check_free_form(function.parameters, f"the parameters of {function.name!r}")
        if must_call and not functions:
            raise refuse_value("tool_choice", "there are no tools to call")
        if schema is None and not must_call:
            return AnswerGrammar(self._form)
        document = "" if schema is None or must_call else _write_document(schema)
        either = bool(functions and document)
        form = self._form if either or self._form.harmony else AnswerFormat()
        answer = self._write_answer(functions, document, one_call=one_call)
        text = answer if opened is None else self._add_thought(answer, opened=opened)
        check_size(text)
        thoughts = None if opened is None else self._form.thoughts
        bare = must_call or (either and self._writes_bare_calls)
        return AnswerGrammar(form._replace(thoughts=thoughts), text, answer, bare)

    def _write_answer(
        self, functions: Sequence[ToolFunction], document: str, *, one_call: bool
    ) -> str:
        """Write the grammar of what follows a thought: a call, the document, or either."""
        if self._form.harmony:
            return self._write_channels(functions, document)
        if functions and document:
            calls = self._write_calls(functions, one_call=one_call)
            rules = document.replace("start:", "document:", 1)
            return f"start: calls | document\n{rules}\n{calls}"
        marks = (self._write_mark(CALL_START), self._write_mark(CALL_END))
        return document or call_grammar(functions, *marks)

    @property
    def _writes_bare_calls(self) -> bool:
        return bool(_BARE_CALL.search(self._text.template))

    def _write_calls(self, functions: Sequence[ToolFunction], *, one_call: bool) -> str:
        """Write the rule `calls`: one or several calls in the model's own format."""
        form, template = find_tool_format(self._text), self._text.template
        more = "" if one_call else ' ("\\n"? call)*'
        if self._writes_bare_calls:
            return f"calls: {json_rule(call_schema(functions, 'parameters'))}"
        start, end = self._write_mark(form.start), self._write_mark(form.end)
        if form.parse is None and "<function=" not in template:
            call = json_rule(call_schema(functions, "arguments"))
            return (
                f'calls: call{more}\ncall: {start} "\\n"? function "\\n"? {end}\nfunction: {call}'
            )
        # The family's parser has its own syntax: the marks are enough.
        if not form.end:
            return f"calls: {start} REST\nREST: {_ANY}"
        return f"calls: call{more}\ncall: {start} inner\n{self._write_until('inner', form.end)}"

    def _write_channels(self, functions: Sequence[ToolFunction], document: str) -> str:
        """Write an answer of gpt-oss: a call in its own channel, or the final one."""
        channel, message = self._write_mark("<|channel|>"), self._write_mark("<|message|>")
        rules: list[str] = []
        for number, function in enumerate(functions):
            header = json.dumps(f"commentary to=functions.{function.name} ")
            arguments = json_rule(describe_arguments(function.parameters or {}))
            json_mark = f'{self._write_mark("<|constrain|>")} "json"'
            rules.append(f"call_{number}: {channel} {header} {json_mark} {message} {arguments}")
        if document:
            rules.append(f'final: {channel} "final" {message} document')
            rules.append(document.replace("start:", "document:", 1))
        names = [rule.partition(":")[0] for rule in rules if not rule.startswith("document:")]
        return "\n".join([f"start: {' | '.join(names)}", *rules])

    def _add_thought(self, answer: str, *, opened: bool) -> str:
        """Return the grammar with a thought before the answer."""
        rules = answer.replace("start:", "answer:", 1)
        if self._form.harmony:
            channel, message = self._write_mark("<|channel|>"), self._write_mark("<|message|>")
            begin = f'{self._write_mark("<|start|>")} "assistant"'
            until = self._write_until("thought", "<|end|>")
            return (
                f'start: ({channel} "analysis" {message} thought {begin})? answer\n{until}\n{rules}'
            )
        thoughts = self._form.thoughts
        assert thoughts is not None  # noqa: S101  # the caller found that the model thinks
        until = self._write_until("thought", thoughts.end)
        before = "thought" if opened else f"({self._write_mark(thoughts.start)} thought)?"
        return f"start: {before} BLANKS answer\n{until}\nBLANKS: /[ \\n]{{0,4}}/\n{rules}"

    def _write_until(self, name: str, end: str) -> str:
        """Write a rule for any text and the mark that ends it."""
        if end in self._text.special_ids:
            return f"{name}: {name.upper()} {self._write_mark(end)}\n{name.upper()}: {_ANY}"
        return f"{name}[suffix={json.dumps(end)}]: {_ANY}"

    def _write_mark(self, mark: str) -> str:
        """Write a mark as part of a rule: special tokens by id, the rest as text."""
        ids = self._text.special_ids
        longest_first = sorted((token for token in ids if token in mark), key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"
        parts = re.split(f"({pattern})", mark)
        return " ".join(f"<[{ids[p]}]>" if p in ids else json.dumps(p) for p in parts if p)


def _write_document(schema: dict[str, Any]) -> str:
    """Return the grammar of JSON that follows the client's schema."""
    check_free_form(schema, "the schema")
    kept = {key: value for key, value in schema.items() if key != "x-guidance"}
    return json_grammar(close_objects(kept))


def call_grammar(
    functions: Sequence[ToolFunction], start: str = f'"{CALL_START}"', end: str = f'"{CALL_END}"'
) -> str:
    """Return the grammar of an answer that must call one of these, between marks that are rules."""
    rule = json_rule(call_schema(functions, "arguments"))
    return f'start: {start} "\\n" call "\\n" {end}\ncall: {rule}'


def call_schema(functions: Sequence[ToolFunction], arguments: str) -> dict[str, Any]:
    """Return the schema of a call in JSON; `arguments` is the family's name for them.

    What a grammar cannot express is not enforced: a client checks its tools' arguments itself.
    """
    kinds = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function.name},
                arguments: describe_arguments(
                    function.parameters or {}, f"#/anyOf/{number}/properties/{arguments}"
                ),
            },
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for number, function in enumerate(functions)
    ]
    return {"anyOf": kinds, "x-guidance": {"lenient": True, "coerce_one_of": True}}
