"""The page's markdown: what a model writes becomes text in few kinds of elements, never markup."""

import json
from importlib.resources import files
from typing import Any

import pytest
import quickjs
from hypothesis import given
from hypothesis import strategies as st

PAGE = files("services.gateway") / "page"
DOCUMENT = """
class Node {
  constructor(tag) { this.tag = tag; this.childNodes = []; this.dataset = {}; }
  appendChild(node) {
    this.childNodes.push(...(node.tag === "#fragment" ? node.childNodes : [node]));
  }
}
const document = {
  createElement: (tag) => new Node(tag),
  createDocumentFragment: () => new Node("#fragment"),
  createTextNode: (text) => ({tag: "#text", text, childNodes: []}),
};
"""
ALLOWED = {"p", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr", "div", "pre",
           "code", "strong", "em", "del", "a", "table", "tbody", "tr", "th", "td", "span",
           "#text"}  # fmt: skip
ATTRIBUTES = {"tag", "childNodes", "dataset", "className", "text", "href", "rel", "target", "start"}
WORDS = ["**", "*", "_", "`", "```", "\n", "\n\n", "# ", "- ", "1. ", "> ", "|", "|-|-|", "~~",
         " ", "[a](", "https://x.y", "javascript:alert(1)", ")", "<script>", "<img onerror=x>",
         "word", "&lt;", '"', "'", "é", "𝄞"]  # fmt: skip

Tree = dict[str, Any]


class Page:
    """The page's renderer in a JavaScript engine, with a document that only builds trees."""

    def __init__(self) -> None:
        self._context = quickjs.Context()
        source = (PAGE / "markdown.js").read_text(encoding="utf-8")
        self._context.eval(DOCUMENT + source.replace('"use strict";', "", 1))
        render = "(text, runs) => JSON.stringify(renderMarkdown(text, JSON.parse(runs)).childNodes)"
        self._context.eval(f"globalThis.shown = {render}")

    def render(self, text: str, runs: list[tuple[str, int]] | None = None) -> list[Tree]:
        """The nodes that a text becomes."""
        shown: list[Tree] = json.loads(self._context.get("shown")(text, json.dumps(runs or [])))
        return shown


PAGE_ENGINE = Page()


def nodes(trees: list[Tree]) -> list[Tree]:
    """All of them, in order."""
    return [node for tree in trees for node in [tree, *nodes(tree["childNodes"])]]


def text_of(trees: list[Tree]) -> str:
    """What a reader reads."""
    return "".join(node.get("text", "") for node in nodes(trees))


def outline(trees: list[Tree]) -> str:
    """Elements in brackets, spans left out."""
    parts = []
    for tree in trees:
        inner = outline(tree["childNodes"])
        if tree["tag"] == "#text":
            parts.append(tree["text"])
        elif tree["tag"] == "span":
            parts.append(inner)
        else:
            parts.append(f"<{tree['tag']}>{inner}</{tree['tag']}>")
    return "".join(parts)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text\nof two lines", "<p>plain text\nof two lines</p>"),
        ("one\n\ntwo", "<p>one</p><p>two</p>"),
        ("## Title\ntext", "<h4>Title</h4><p>text</p>"),
        ("**bold**, *soft* `x`", "<p><strong>bold</strong>, <em>soft</em> <code>x</code></p>"),
        ("**bold with `code`**", "<p><strong>bold with <code>code</code></strong></p>"),
        ("2 * 3 * 4 and snake_case_name", "<p>2 * 3 * 4 and snake_case_name</p>"),
        ("`**not bold**`", "<p><code>**not bold**</code></p>"),
        ("- a\n- b\n\nc", "<ul><li>a</li><li>b</li></ul><p>c</p>"),
        ("1. a\n2. b", "<ol><li>a</li><li>b</li></ol>"),
        ("- a\n  more", "<ul><li>a\n  more</li></ul>"),
        ("text\n- a", "<p>text</p><ul><li>a</li></ul>"),
        ("```python\n# **no**\n\ny\n```\nend", "<div><pre># **no**\n\ny</pre></div><p>end</p>"),
        ("```\nunfinished", "<div><pre>unfinished</pre></div>"),
        ("> said\n> so", "<blockquote>said\nso</blockquote>"),
        ("a\n\n---\n\nb", "<p>a</p><hr></hr><p>b</p>"),
        ("|a|b|\n|-|-|\n|1|**2**|", "<table><tbody><tr><th>a</th><th>b</th></tr>"
         "<tr><td>1</td><td><strong>2</strong></td></tr></tbody></table>"),
        ("a [link](https://example.org/x)", "<p>a <a>link</a></p>"),
    ],
)  # fmt: skip
def test_what_models_write_is_shown(text: str, shown: str) -> None:
    """Headings, lists, code, tables, quotes, emphasis."""
    assert outline(PAGE_ENGINE.render(text)) == shown


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "[click](javascript:alert(1))",
        "[click](JaVaScRiPt:alert(1))",
        "[click](data:text/html,<script>alert(1)</script>)",
        "[click](https://x.y/\"onmouseover=alert(1))",
        "![x](https://x.y/track.png)",
        "```html\n<script>alert(1)</script>\n```",
        "# <b onclick=alert(1)>title</b>",
        "|<i>|b|\n|-|-|\n|<svg onload=alert(1)>|2|",
    ],
)  # fmt: skip
def test_a_models_text_is_never_markup(text: str) -> None:
    """Tags are shown as they were written; links lead to http or https, or are no links."""
    found = nodes(PAGE_ENGINE.render(text))
    assert {node["tag"] for node in found} <= ALLOWED
    assert all(node["href"].startswith("https://x.y/") for node in found if node["tag"] == "a")
    assert not [node for node in found if '"' in node.get("href", "")]
    for tag in ("<script>", "<img src=x onerror=alert(1)>", "javascript:"):
        assert tag not in text or tag in text_of(PAGE_ENGINE.render(text))


@given(st.lists(st.sampled_from(WORDS), max_size=40))
def test_any_text_is_shown_safely(words: list[str]) -> None:
    """Only known elements and attributes; no letter of the words is lost."""
    text = "".join(words)
    trees = PAGE_ENGINE.render(text)
    found = nodes(trees)
    assert {node["tag"] for node in found} <= ALLOWED
    assert all(set(node) <= ATTRIBUTES for node in found)
    assert all(node["href"].startswith("https://x.y") for node in found if node["tag"] == "a")
    shown = text_of(trees)
    assert all(shown.count(word) <= text.count(word) for word in ("word", "é", "<script>"))
    if "```" not in text and "[a](" not in text:
        assert shown.count("word") == text.count("word")


@given(st.lists(st.sampled_from(WORDS), max_size=30), st.data())
def test_each_piece_has_the_colour_of_its_origin(words: list[str], data: st.DataObject) -> None:
    """Whatever the markup, a shown character stands in a span of the run that it came from."""
    text = "".join(words)
    units = len(text.encode("utf-16-le")) // 2
    cut = data.draw(st.integers(0, units))
    trees = PAGE_ENGINE.render(text, [("hit", cut), ("miss", units - cut)])
    spans = [node for node in nodes(trees) if node["tag"] == "span"]
    assert {span["className"] for span in spans} <= {"hit", "miss"}
    kinds = [span["className"] for span in spans]
    assert kinds == sorted(kinds), "all hits come before all misses"


def test_a_long_answer_is_rendered_at_all() -> None:
    """Many marks in one paragraph are no recursion, and more than that stay text."""
    text = "`a` **b** " * 1500
    assert text_of(PAGE_ENGINE.render(text)).count("b") == 1500
    assert outline(PAGE_ENGINE.render("`a` " * 6000)).count("<code>") == 0


def test_the_page_builds_no_markup_from_text() -> None:
    """Nothing in its scripts parses HTML or runs text."""
    scripts = "".join((PAGE / name).read_text("utf-8") for name in ("markdown.js", "page.js"))
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                 "new Function", "DOMParser", "setAttribute"):  # fmt: skip
        assert word not in scripts
