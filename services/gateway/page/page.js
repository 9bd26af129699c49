const $ = (id) => document.getElementById(id);
const STORE = "ssd.chat", LOOK_MS = 2000, LOOK_SOON_MS = 500;
const FIELDS = ["mode", "temperature", "max", "draft", "system"];
const WORDS = {
  "speed": "Tokens per second after the first token.",
  "first token": "From sending the question to the first token: mostly the time to read the prompt.",
  "accepted": "Draft tokens that were what the target would have said itself, of those it verified.",
  "hits": "Rounds whose next draft was ready when they ended, of those that prepared one.",
  "tokens a round": "What one pass of the target brings on average; plain decoding brings 1.",
  "drafting hidden": "Share of the drafter's work that was done while the target was busy anyway.",
  "times plain": "Speed over that of plain decoding, which is measured now and then beside speculation.",
  "planner": "What was decided for the rounds, by what was measured.",
  "cached": "Tokens of the prompt that were found in the memory of earlier requests.",
};
const ENDS = {
  stop: "", length: "cut off: the longest answer (max tokens) is reached, or the context is full",
  tool_calls: "", stopped: "stopped by you", error: "",
};
let turns = [];  /* {role, content, runs, end} */
let rounds = [], controller = null, waitingSince = 0;

/* ---------------------------------------------------------------- tables */

function cell(row, text, kind, tag = "td") {
  const td = document.createElement(tag);
  td.textContent = text;
  if (kind) td.className = kind;
  if (tag === "td" && WORDS[text]) td.title = WORDS[text];
  row.appendChild(td);
}
function fill(id, rows, head) {
  const body = document.createElement("tbody");
  const add = (fields, tag) => {
    const tr = document.createElement("tr");
    fields.forEach((text, i) => cell(tr, text, tag === "td" && i && head ? "n" : "", tag));
    body.appendChild(tr);
  };
  if (head) add(head, "th");
  rows.forEach((fields) => add(fields, "td"));
  $(id).replaceChild(body, $(id).tBodies[0]);
}
const last = (path) => path.replace(/\/+$/, "").split("/").pop();
const share = (x) => (100 * x).toFixed(0) + " %";
const age = (s) => s < 2 ? "just now" : s < 120 ? s.toFixed(0) + " s ago" : (s / 60).toFixed(0) + " min ago";
const headers = () => {
  const found = {"Content-Type": "application/json"};
  if ($("key").value) found.Authorization = "Bearer " + $("key").value;
  return found;
};

/* ---------------------------------------------------------------- figures */

function plan(ssd, timings) {
  if (ssd.mode === "ar") return "plain decoding, as asked";
  if (!timings.draft_n) return "plain decoding: nothing worth verifying was drafted";
  return "verify " + (timings.draft_n / Math.max(1, ssd.rounds)).toFixed(1) + " draft tokens a round";
}
function timesPlain(ssd, timings) {
  // A pass over a draft takes no less time than a plain one: more is due to other conditions.
  const most = ssd.plain_tok_s * ssd.mean_acceptance_length;
  if (!ssd.plain_tok_s || !timings.draft_n || timings.predicted_per_second > most) return "-";
  return (timings.predicted_per_second / ssd.plain_tok_s).toFixed(2) + " (plain decoding: " +
    ssd.plain_tok_s.toFixed(1) + " tok/s, measured " + age(ssd.plain_age_s) + ")";
}
function showLast(ssd, timings) {
  const outcomes = ssd.cache_hits + ssd.cache_misses, prompt = timings.cache_n + timings.prompt_n;
  $("lasthead").textContent = "Last answer";
  fill("last", [
    ["speed", timings.predicted_n + " tokens, " + timings.predicted_per_second.toFixed(1) + " tok/s"],
    ["times plain", timesPlain(ssd, timings)],
    ["first token", (ssd.ttft_ms / 1e3).toFixed(2) + " s"],
    ["cached", timings.cache_n + " of " + prompt + " prompt tokens"],
    ["accepted", timings.draft_n ? share(ssd.acceptance_rate) + " (" + timings.draft_n_accepted + " of " + timings.draft_n + ")" : "-"],
    ["hits", outcomes ? share(ssd.cache_hits / outcomes) + " (" + ssd.cache_hits + " of " + outcomes + ")" : "-"],
    ["tokens a round", ssd.mean_acceptance_length.toFixed(2)],
    ["drafting hidden", ssd.overlap_ratio ? share(ssd.overlap_ratio) : "-"],
    ["planner", plan(ssd, timings)],
  ]);
}
function showLive() {
  const tokens = rounds.reduce((sum, r) => sum + r.origins.length, 0);
  const drafted = rounds.reduce((sum, r) => sum + r.origins.filter((o) => o !== "target").length, 0);
  const seconds = (rounds[rounds.length - 1].to - rounds[0].to) / 1e3;
  $("lasthead").textContent = "This answer, so far";
  fill("last", [
    ["speed", tokens + " tokens" + (seconds > 0 ? ", " + ((tokens - rounds[0].origins.length) / seconds).toFixed(1) + " tok/s" : "")],
    ["first token", ((rounds[0].to - waitingSince) / 1e3).toFixed(2) + " s"],
    ["tokens a round", (tokens / rounds.length).toFixed(2)],
    ["drafted", tokens ? share(drafted / tokens) + " of the answer" : "-"],
  ]);
}
function draw() {
  const canvas = $("timeline"), scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * scale; canvas.height = height * scale;
  const g = canvas.getContext("2d");
  g.scale(scale, scale);
  g.clearRect(0, 0, width, height);
  if (!rounds.length) return;
  const style = getComputedStyle(document.documentElement);
  const colours = Object.fromEntries(["target", "hit", "miss", "lookup", "branch"].map((o) => [o, style.getPropertyValue("--" + o)]));
  const begin = rounds[0].from, span = Math.max(1, rounds[rounds.length - 1].to - begin);
  const tallest = Math.max(4, ...rounds.map((r) => r.origins.length));
  for (const round of rounds) {
    const x = width * (round.from - begin) / span, w = Math.max(1, width * (round.to - round.from) / span - 1);
    round.origins.forEach((origin, i) => {
      const h = height / tallest;
      g.fillStyle = colours[origin];
      g.fillRect(x, height - (i + 1) * h, w, h - 1);
    });
  }
}

/* ---------------------------------------------------------------- the conversation */

async function copy(button, text) {
  try { await navigator.clipboard.writeText(text); button.textContent = "copied"; }
  catch (error) { button.textContent = "not allowed"; }
  setTimeout(() => { button.textContent = "copy"; }, 1500);
}
function copyButton(text) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "copy";
  button.addEventListener("click", () => copy(button, text()));
  return button;
}
function place(role) {
  const div = document.createElement("div");
  div.className = "turn " + role;
  $("talk").appendChild(div);
  return div;
}
function show(div, turn) {
  if (turn.role === "user") { div.textContent = turn.content; return; }
  const text = document.createElement("div"), foot = document.createElement("div");
  text.className = "text"; foot.className = "foot";
  text.appendChild(renderMarkdown(turn.content, turn.runs));
  for (const box of text.querySelectorAll(".code")) {
    const code = box.firstChild.textContent;
    box.appendChild(copyButton(() => code));
  }
  if (turn.end !== undefined) {
    foot.appendChild(copyButton(() => turn.content));
    if (turn.end) {
      const why = document.createElement("span");
      why.className = turn.end in ENDS ? "cut" : "bad";
      why.textContent = turn.end in ENDS ? ENDS[turn.end] : turn.end;
      foot.appendChild(why);
    }
  } else if (turn.note) {
    foot.textContent = turn.note;
  }
  div.replaceChildren(text, foot);
}
function scroll() { $("talk").scrollTop = $("talk").scrollHeight; }
function save() {
  const fields = Object.fromEntries(FIELDS.map((id) => [id, $(id).value]));
  for (let kept = turns; ; kept = kept.slice(2)) {
    try { localStorage.setItem(STORE, JSON.stringify({turns: kept, fields, colours: $("colours").checked})); return; }
    catch (error) { if (!kept.length) return; }  /* the store is full: the oldest turns go */
  }
}
function restore() {
  let saved;
  try { saved = JSON.parse(localStorage.getItem(STORE) || "null"); } catch (error) { saved = null; }
  if (!saved || !Array.isArray(saved.turns)) return;
  for (const id of FIELDS) if (typeof (saved.fields || {})[id] === "string") $(id).value = saved.fields[id];
  $("colours").checked = saved.colours !== false;
  $("talk").classList.toggle("coloured", $("colours").checked);
  $("systembox").open = Boolean($("system").value);
  turns = saved.turns.filter((t) => t && typeof t.content === "string" && ["user", "assistant"].includes(t.role));
  for (const turn of turns) show(place(turn.role), turn);
  scroll();
}
async function* events(response) {
  const reader = response.body.getReader(), decoder = new TextDecoder();
  let held = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    held += decoder.decode(value, {stream: true});
    for (let end; (end = held.indexOf("\n\n")) >= 0; held = held.slice(end + 2)) {
      const line = held.slice(0, end);
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}
function body() {
  const system = $("system").value.trim();
  const messages = turns.map(({role, content}) => ({role, content}));
  if (system) messages.unshift({role: "system", content: system});
  const asked = {messages, stream: true, stream_options: {include_origins: true, include_usage: true},
    max_tokens: Number($("max").value) || 512};
  if ($("temperature").value !== "") asked.temperature = Number($("temperature").value);
  if ($("mode").value === "ar") asked.draft_model = null;
  else if ($("draft").value) asked.num_draft_tokens = Number($("draft").value);
  return asked;
}
function add(turn, content, origins) {
  turn.content += content;
  for (const [origin, text] of origins.length ? origins : [["target", content]]) {
    const run = turn.runs[turn.runs.length - 1];
    if (run && run[0] === origin) run[1] += text.length; else turn.runs.push([origin, text.length]);
  }
}
async function stream(turn, redraw) {
  const response = await fetch("v1/chat/completions",
    {method: "POST", headers: headers(), body: JSON.stringify(body()), signal: controller.signal});
  if (!response.ok) throw new Error((await response.json()).error.message);
  let before = performance.now();
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    if (choice) {
      const origins = (event.ssd && event.ssd.origins) || [];
      add(turn, choice.delta.content || "", origins);
      if (choice.finish_reason) turn.reason = choice.finish_reason;
      if (origins.length) {
        const now = performance.now();
        rounds.push({from: before, to: now, origins: origins.map((pair) => pair[0])});
        before = now;
      }
      redraw();
    }
    if (event.timings) { turn.figures = true; showLast(event.ssd, event.timings); }
  }
}
async function answer(question) {
  const talk = turns;  /* `Reset` begins another one */
  talk.push({role: "user", content: question});
  show(place("user"), talk[talk.length - 1]);
  const div = place("assistant"), turn = {role: "assistant", content: "", runs: [], note: "waiting"};
  let due = false;
  const redraw = () => {
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      if (turn.end !== undefined) return;
      turn.note = rounds.length ? "" : turn.note;
      const below = $("talk").scrollHeight - $("talk").scrollTop - $("talk").clientHeight < 60;
      show(div, turn);
      if (below) scroll();
      if (rounds.length) draw();
      if (rounds.length && !turn.figures) showLive();
    });
  };
  controller = new AbortController();
  rounds = [];
  waitingSince = performance.now();
  show(div, turn);
  scroll();
  const watch = setInterval(() => watchPrompt(turn, redraw), LOOK_SOON_MS);
  try {
    await stream(turn, redraw);
    turn.end = turn.reason === "length" ? "length" : "";
  } catch (error) {
    turn.end = error.name === "AbortError" ? "stopped" : error.message || "the answer broke off";
  }
  clearInterval(watch);
  controller = null;
  delete turn.note;
  delete turn.reason;
  delete turn.figures;
  draw();
  show(div, turn);
  if (turn.content) talk.push(turn); else { talk.pop(); if (turn.end === "stopped") div.remove(); }
  scroll();
  save();
}

/* ---------------------------------------------------------------- the stack */

/* How much of a long prompt is read: the request whose age is ours. */
async function watchPrompt(turn, redraw) {
  if (rounds.length || turn.content) return;
  const seconds = (performance.now() - waitingSince) / 1e3;
  turn.note = "waiting, " + seconds.toFixed(0) + " s";
  try {
    const {stack} = await (await fetch("health", {headers: headers()})).json();
    const found = ((stack && stack.sequences) || []).filter((s) => s.state === "prefill" && s.computed_tokens);
    found.sort((a, b) => Math.abs(a.age_s - seconds) - Math.abs(b.age_s - seconds));
    if (found.length) turn.note = "reading the prompt: " + found[0].computed_tokens + " of " + found[0].prompt_tokens + " tokens";
  } catch (error) { turn.note = "the gateway does not answer"; }
  redraw();
}
function now(recent, choice) {
  const speed = recent.busy_s ? recent.tok_s.toFixed(1) + " tok/s" : "idle";
  const does = choice.speculating ? "up to " + choice.num_draft_tokens + " draft tokens, " + choice.branches + " branches" : "plain decoding";
  const rate = (whole, value) => whole ? share(value) : "-";
  const plain = choice.plain_tok_s ? choice.plain_tok_s.toFixed(1) + " tok/s, measured " + age(choice.plain_age_s) : "not measured";
  fill("now", [["speed", speed], ["accepted", rate(recent.drafted, recent.acceptance_rate)],
    ["hits", rate(recent.cache_hits + recent.cache_misses, recent.hit_rate)], ["planner", does], ["plain decoding", plain]]);
}
async function look() {
  try {
    const health = await (await fetch("health", {headers: headers()})).json();
    const stack = health.stack;
    $("state").className = health.status === "ok" ? "" : "bad";
    $("keybox").hidden = Boolean(stack);
    if (health.models && !stack) { $("state").textContent = health.status + " · no model is loaded"; $("keybox").hidden = true; return; }
    if (!stack) { $("state").textContent = health.status + " · enter the API key"; return; }
    $("model").textContent = last(stack.model);
    $("state").textContent = health.status + " · " + stack.active + " running, " + stack.waiting + " waiting";
    fill("stack", stack.services.map((s) => [s.role, s.backend + " on " + s.compute_unit, s.model ? last(s.model) : "-", String(s.pid)]), ["", "backend", "model", "pid"]);
    now(stack.window, stack.planner);
    const reply = await fetch("recent", {headers: headers()});
    if (reply.ok) {
      const found = (await reply.json()).answers;
      fill("recent", found.slice(-8).reverse().map((a) => [a.mode, a.tok_s.toFixed(1), share(a.acceptance_rate), share(a.hit_rate), String(a.tokens)]), ["", "tok/s", "accepted", "hits", "tokens"]);
    }
  } catch (error) {
    $("state").textContent = "the gateway does not answer";
    $("state").className = "bad";
  }
}
async function send() {
  const question = $("ask").value.trim();
  if (!question || controller) return;
  $("ask").value = "";
  $("send").hidden = true; $("stop").hidden = false;
  await answer(question);
  $("send").hidden = false; $("stop").hidden = true;
  look();
}
$("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("ask").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("settings").addEventListener("change", save);
$("colours").addEventListener("change", () => $("talk").classList.toggle("coloured", $("colours").checked));
$("stop").addEventListener("click", () => controller && controller.abort());
$("reset").addEventListener("click", () => {
  if (controller) controller.abort();
  turns = []; rounds = [];
  $("talk").replaceChildren();
  draw();
  save();
});
window.addEventListener("resize", draw);
restore();
look();
setInterval(look, LOOK_MS);
