"use strict";
/* Markdown as models write it, into DOM nodes. A model's text is data and never markup: nodes are
   made one by one, every character of it goes into a text node, and a link leads to http or
   https or is no link. Nothing here parses HTML.

   `runs` says where the text came from, as [origin, length] pairs in order; each text node gets
   the class of its origin. */

const INLINE = [
  {kind: "code", pattern: /`([^`\n]+)`/},
  {kind: "strong", pattern: /\*\*(?=\S)([^\n]*?\S)\*\*/},
  {kind: "em", pattern: /(?<![\w*])[*_](?=[^\s*_])([^\n*_]*[^\s*_])[*_](?![\w*])/},
  {kind: "del", pattern: /~~(?=\S)([^\n]*?\S)~~/},
  {kind: "a", pattern: /\[([^\]\n]+)\]\((https?:\/\/[^\s()<>"']+)\)/},
];
const LIST = /^(\s*)([-*+]|\d{1,9}[.)])\s+(?=\S)/;
const RULE = /^\s*\|?[\s:-]*-[\s:-]*\|[\s|:-]*$/;
const DEEPEST = 8, LONGEST = 20000;

class Markdown {
  constructor(text, runs) {
    this.text = text;
    this.ends = [];
    let end = 0;
    for (const [origin, length] of runs || []) this.ends.push([end += length, origin]);
  }

  /* The characters from `start` to `end`, in spans by origin. */
  plain(parent, start, end) {
    let at = start;
    for (const [stop, origin] of [...this.ends, [Infinity, "target"]]) {
      if (at >= end) return;
      if (stop <= at) continue;
      const span = document.createElement("span");
      span.className = origin;
      span.appendChild(document.createTextNode(this.text.slice(at, Math.min(stop, end))));
      parent.appendChild(span);
      at = Math.min(stop, end);
    }
  }

  /* What stands in one paragraph: code, bold, emphasis, struck, links. */
  inline(parent, start, end, depth = 0) {
    const kinds = depth < DEEPEST && end - start < LONGEST ? INLINE : [];
    for (let at = start; at < end;) {
      const text = this.text.slice(at, end);
      let first = null, chosen = "";
      for (const {kind, pattern} of kinds) {
        const found = pattern.exec(text);
        if (found && (first === null || found.index < first.index)) { first = found; chosen = kind; }
      }
      if (first === null) return this.plain(parent, at, end);
      const begin = at + first.index, inner = begin + first[0].indexOf(first[1]);
      this.plain(parent, at, begin);
      const node = document.createElement(chosen);
      if (chosen === "a") { node.href = first[2]; node.rel = "noopener noreferrer"; node.target = "_blank"; }
      if (chosen === "code") this.plain(node, inner, inner + first[1].length);
      else this.inline(node, inner, inner + first[1].length, depth + 1);
      parent.appendChild(node);
      at = begin + first[0].length;
    }
  }

  /* [start, end] of each line, without its newline. */
  lines() {
    const found = [];
    for (let start = 0; start <= this.text.length;) {
      let end = this.text.indexOf("\n", start);
      if (end < 0) end = this.text.length;
      found.push([start, end]);
      start = end + 1;
    }
    return found;
  }

  render() {
    const parent = document.createDocumentFragment(), lines = this.lines();
    const line = (i) => this.text.slice(lines[i][0], lines[i][1]);
    for (let i = 0; i < lines.length;) {
      const [start, end] = lines[i], text = line(i);
      const fence = /^\s*(```+|~~~+)\s*([\w+#.-]*)/.exec(text);
      const heading = /^(#{1,6})\s+(?=\S)/.exec(text);
      if (fence) {
        let last = i + 1;
        while (last < lines.length && !line(last).trim().startsWith(fence[1])) last++;
        this.code(parent, fence[2], lines, i + 1, last);
        i = last + 1;
      } else if (heading) {
        const node = document.createElement("h" + Math.min(6, heading[1].length + 2));
        this.inline(node, start + heading[0].length, end);
        parent.appendChild(node);
        i++;
      } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(text)) {
        parent.appendChild(document.createElement("hr"));
        i++;
      } else if (LIST.test(text)) {
        i = this.list(parent, lines, i);
      } else if (/^\s*>/.test(text)) {
        const node = document.createElement("blockquote");
        while (i < lines.length && /^\s*>/.test(line(i))) {
          const mark = /^\s*>\s?/.exec(line(i))[0].length;
          this.inline(node, lines[i][0] + mark, Math.min(lines[i][1] + 1, this.text.length));
          i++;
        }
        parent.appendChild(node);
      } else if (text.includes("|") && i + 1 < lines.length && RULE.test(line(i + 1))) {
        i = this.table(parent, lines, i);
      } else if (!text.trim()) {
        i++;
      } else {
        let last = i;
        while (last + 1 < lines.length && line(last + 1).trim() && !this.begins(line(last + 1))) last++;
        const node = document.createElement("p");
        this.inline(node, start, lines[last][1]);
        parent.appendChild(node);
        i = last + 1;
      }
    }
    return parent;
  }

  begins(text) { return /^\s*(```|~~~|#{1,6}\s|>)/.test(text) || LIST.test(text); }

  code(parent, language, lines, first, last) {
    const box = document.createElement("div"), pre = document.createElement("pre");
    box.className = "code";
    if (language) box.dataset.language = language;
    if (first < last) this.plain(pre, lines[first][0], lines[last - 1][1]);
    box.appendChild(pre);
    parent.appendChild(box);
  }

  list(parent, lines, i) {
    const slice = (n) => this.text.slice(lines[n][0], lines[n][1]);
    const ordered = /\d/.test(LIST.exec(slice(i))[2]);
    const node = document.createElement(ordered ? "ol" : "ul");
    if (ordered) node.start = parseInt(LIST.exec(slice(i))[2], 10);
    while (i < lines.length) {
      const item = LIST.exec(slice(i));
      if (!item || (/\d/.test(item[2]) !== ordered && !item[1])) break;
      const start = lines[i][0] + item[0].length;
      const entry = document.createElement("li");
      if (item[1]) entry.className = "deep";
      let end = lines[i++][1];
      while (i < lines.length && /^\s{2,}\S/.test(slice(i)) && !this.begins(slice(i))) end = lines[i++][1];
      this.inline(entry, start, end);
      node.appendChild(entry);
    }
    parent.appendChild(node);
    return i;
  }

  table(parent, lines, i) {
    const node = document.createElement("table"), body = document.createElement("tbody");
    for (let text; i < lines.length; i++) {
      text = this.text.slice(lines[i][0], lines[i][1]);
      if (!text.includes("|")) break;
      if (RULE.test(text)) continue;
      const tr = document.createElement("tr");
      this.cells(tr, lines[i][0], text, body.childNodes.length ? "td" : "th");
      body.appendChild(tr);
    }
    node.appendChild(body);
    parent.appendChild(node);
    return i;
  }

  cells(row, start, text, kind) {
    let at = text.startsWith("|") ? 1 : 0;
    while (at < text.length) {
      let end = text.indexOf("|", at);
      if (end < 0) end = text.length;
      const cell = document.createElement(kind);
      this.inline(cell, start + at, start + end);
      row.appendChild(cell);
      at = end + 1;
    }
  }
}

function renderMarkdown(text, runs) { return new Markdown(text, runs).render(); }
