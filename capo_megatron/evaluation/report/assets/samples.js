"use strict";
// The browser of responses: a list of which only the visible rows exist, and one response in full.

const SHOWN = 20_000; // characters of a text that are shown before more is asked for
const TALLEST = 8e6; // pixels; browsers go wrong with taller elements
const KEPT = 24; // opened pieces of text that are kept
const MARKS = { correct: "✓", wrong: "✕", timeout: "◷", unparseable: "?", unknown: "?" };
const WORDS = { correct: "right", wrong: "wrong", timeout: "timed out", unparseable: "unparseable", unknown: "unknown" };
const DELIMITERS = [
  { left: "$$", right: "$$", display: true }, { left: "\\[", right: "\\]", display: true },
  { left: "\\(", right: "\\)", display: false }, { left: "$", right: "$", display: false },
  ...["equation", "equation*", "align", "align*", "gather", "gather*", "alignat", "alignat*", "CD"].map((name) => (
    { left: `\\begin{${name}}`, right: `\\end{${name}}`, display: true })),
];

const KATEX = { output: "mathml", throwOnError: true, strict: false, trust: false, maxSize: 20, maxExpand: 500 };

let katexReady = null;

function loadKatex() {
  katexReady ??= unpack("katex").then((bytes) => {
    document.head.append(make("script", { textContent: new TextDecoder().decode(bytes) }));
  });
  return katexReady;
}

// Typeset the formulas in an element that holds one text. What is no valid LaTeX stays the text that it is. Paragraphs
// are done one by one, so that a dollar sign without its partner spoils only its own.
async function typeset(element) {
  const source = element.textContent;
  if (!/[$\\]/.test(source)) return;
  await loadKatex();
  const copy = make("div", {});
  for (const part of source.split(/(\n[^\S\n]*\n\s*)/)) copy.append(/\S/.test(part) ? typesetParagraph(part) : part);
  for (const formula of copy.querySelectorAll('math[display="block"]')) { // it has its own distance to the lines around it
    const place = formula.closest(".katex").parentElement;
    for (const side of ["previousSibling", "nextSibling"]) {
      const beside = place[side] ?? place.parentElement[side];
      if (beside?.nodeType === Node.TEXT_NODE) beside.data = beside.data.replace(side === "nextSibling" ? /^\s*\n/ : /\n\s*$/, "");
    }
  }
  if (element.textContent === source) element.replaceChildren(...copy.childNodes);
}

// The same for a text that is one formula, such as an answer.
async function typesetFormula(element, text) {
  await loadKatex();
  const copy = make("span", {});
  try { katex.render(text, copy, { ...KATEX }); element.replaceChildren(copy); } catch { /* it stays text */ }
}

function typesetParagraph(text) {
  const found = make("span", {}, text);
  try {
    renderMathInElement(found, { ...KATEX, delimiters: DELIMITERS, errorCallback: () => {} });
    return found;
  } catch { return make("span", {}, text); } // nested too deeply to be a formula
}

class Texts {
  constructor(name, starts) { this.name = name; this.starts = starts; this.open = new Map(); }

  // The entry with this number, from the piece that it is in.
  async get(number) {
    let low = 0, high = this.starts.length - 1;
    while (low < high) { const middle = (low + high + 1) >> 1; if (this.starts[middle] <= number) low = middle; else high = middle - 1; }
    if (!this.open.has(low)) {
      if (this.open.size >= KEPT) this.open.delete(this.open.keys().next().value);
      this.open.set(low, unpackJson(`${this.name}${low}`));
    }
    return (await this.open.get(low))[number - this.starts[low]];
  }
}

class Browser {
  static async start() {
    const index = await unpackJson("index");
    const types = { source: Uint16Array, question: Uint32Array, sample: Uint32Array, step: Uint32Array, verdict: Uint8Array,
      truncated: Uint8Array, tokens: Uint32Array, answer: Uint32Array, logprob: Float32Array };
    const columns = {};
    await Promise.all(Object.entries(types).map(async ([name, type]) => { columns[name] = new type((await unpack(`column-${name}`)).buffer); }));
    return new Browser(index, columns);
  }

  constructor(index, columns) {
    this.index = index;
    this.columns = columns;
    this.responses = new Texts("response", index.responses);
    this.prompts = new Texts("prompt", index.prompts);
    this.confidence = Float32Array.from(columns.logprob, (value) => Math.exp(Math.min(value, 0)));
    this.haystack = index.questions.map(([benchmark, id, text]) => `${index.benchmarks[benchmark]} ${id} ${text}`.toLowerCase());
    this.answers = index.answers.map((text) => (text ?? "").toLowerCase());
    this.view = [];
    this.chosen = -1; // position in the view
    this.maths = true;
    this.sort = { key: "confidence", down: true };
    this.form = document.getElementById("filters");
    this.rows = document.getElementById("rows");
    this.space = document.getElementById("space");
    this.detail = document.getElementById("detail");
    this.narrow = matchMedia("(max-width: 760px)");
  }

  begin() {
    this.fillFilters();
    this.listen();
    this.preset("confident-wrong");
  }

  fillFilters() {
    const { sources, benchmarks, verdicts } = this.index;
    const options = (name, first, texts, values) => this.form.elements[name].replaceChildren(
      ...(first ? [make("option", { value: "" }, first)] : []),
      ...texts.map((text, at) => make("option", { value: String(values ? values[at] : at) }, visible(text))));
    options("source", sources.length > 1 ? "all" : null, sources.map((found) => `${found.name} (${count(found.kept)}${found.kept < found.total ? ` of ${count(found.total)}` : ""})`));
    options("benchmark", benchmarks.length > 1 ? "all" : null, benchmarks);
    const seen = [...new Set(this.columns.verdict)].sort();
    options("verdict", "all", [...seen.map((at) => WORDS[verdicts[at]]), "cut off"], [...seen, "cut"]);
    const evaluated = sources.findLastIndex((found) => !found.training);
    this.form.elements.source.value = sources.length > 1 ? String(Math.max(evaluated, 0)) : "0";
  }

  listen() {
    let waiting = 0;
    this.form.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => this.refresh(), 120); });
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.rows.addEventListener("scroll", () => requestAnimationFrame(() => this.paint()));
    new ResizeObserver(() => this.layOut()).observe(this.rows);
    this.narrow.addEventListener("change", () => this.layOut());
    this.rows.addEventListener("click", (event) => {
      const row = event.target.closest("[data-at]");
      if (row) this.choose(Number(row.dataset.at), true);
    });
    this.rows.addEventListener("keydown", (event) => {
      const page = Math.max(1, this.visibleRows() - 1), last = this.view.length - 1;
      const to = { ArrowDown: this.chosen + 1, ArrowUp: this.chosen - 1, PageDown: this.chosen + page, PageUp: this.chosen - page, Home: 0, End: last }[event.key];
      if (event.key === "Enter") { event.preventDefault(); this.detail.focus(); return; }
      if (to === undefined || last < 0) return;
      event.preventDefault();
      this.choose(Math.max(0, Math.min(last, to)), false);
    });
    for (const button of document.querySelectorAll("[data-sort]")) {
      button.addEventListener("click", () => {
        const key = button.dataset.sort, again = this.sort.key === key;
        this.sort = { key, down: again ? !this.sort.down : key === "confidence" || key === "tokens" };
        this.refresh();
      });
    }
    for (const button of document.querySelectorAll("[data-preset]")) button.addEventListener("click", () => this.preset(button.dataset.preset));
  }

  preset(name) {
    const code = (verdict) => String(this.index.verdicts.indexOf(verdict));
    const views = {
      "confident-wrong": [code("wrong"), "confidence", true], "unsure-right": [code("correct"), "confidence", false],
      longest: ["", "tokens", true], cut: ["cut", "tokens", true], all: ["", "question", false],
    };
    const [verdict, key, down] = views[name];
    for (const field of ["low", "high", "shortest", "longest", "text"]) this.form.elements[field].value = "";
    this.form.elements.once.checked = name === "confident-wrong" || name === "unsure-right";
    const select = this.form.elements.verdict;
    select.value = [...select.options].some((option) => option.value === verdict) ? verdict : "";
    this.sort = { key, down };
    this.refresh();
  }

  // Which rows the filters let through, in the order asked for; the first of them is shown.
  refresh() {
    const field = (name) => this.form.elements[name].value;
    const number = (name, otherwise) => (field(name) === "" ? otherwise : Number(field(name)));
    const { columns, confidence, index } = this;
    const source = field("source"), benchmark = field("benchmark"), verdict = field("verdict"), text = field("text").trim().toLowerCase();
    const low = number("low", -1), high = number("high", 2), fewest = number("shortest", 0), most = number("longest", Infinity);
    const anyConfidence = low < 0 && high > 1;
    const matches = text ? this.haystack.map((found) => found.includes(text)) : null;
    const found = [];
    for (let row = 0; row < index.rows; row++) {
      if (source !== "" && columns.source[row] !== Number(source)) continue;
      if (benchmark !== "" && index.questions[columns.question[row]][0] !== Number(benchmark)) continue;
      if (verdict === "cut" ? !columns.truncated[row] : verdict !== "" && columns.verdict[row] !== Number(verdict)) continue;
      if (columns.tokens[row] < fewest || columns.tokens[row] > most) continue;
      if (!anyConfidence && !(confidence[row] >= low && confidence[row] <= high)) continue;
      if (matches && !matches[columns.question[row]] && !this.answers[columns.answer[row]].includes(text)) continue;
      found.push(row);
    }
    this.view = this.sorted(found);
    if (this.form.elements.once.checked) this.view = this.firstOfEach(this.view);
    for (const button of document.querySelectorAll("[data-sort]")) {
      const active = button.dataset.sort === this.sort.key;
      button.setAttribute("aria-pressed", String(active));
      button.dataset.direction = active ? (this.sort.down ? "down" : "up") : "";
    }
    document.getElementById("status").textContent = `${count(this.view.length)} of ${count(index.rows)} responses`;
    this.chosen = -1;
    this.rows.scrollTop = 0;
    this.layOut();
    if (found.length) this.choose(0, false, true); else this.detail.replaceChildren(make("p", { className: "empty" }, "No response passes these filters."));
  }

  sorted(rows) {
    const { columns, confidence, index } = this;
    const text = (row) => index.answers[columns.answer[row]] ?? "";
    const key = {
      verdict: (row) => columns.verdict[row],
      confidence: (row) => confidence[row],
      tokens: (row) => columns.tokens[row],
      question: (row) => index.questions[columns.question[row]][0] * 2 ** 32 + columns.question[row],
    }[this.sort.key];
    const sign = this.sort.down ? -1 : 1;
    if (!key) { const order = new Intl.Collator("en", { numeric: true }); return rows.sort((a, b) => sign * order.compare(text(a), text(b)) || a - b); }
    const keys = new Float64Array(index.rows);
    for (const row of rows) keys[row] = key(row);
    return rows.sort((a, b) => { // what has no value comes last
      const lacks = Number.isNaN(keys[a]) - Number.isNaN(keys[b]);
      return lacks || sign * (keys[a] - keys[b]) || a - b;
    });
  }

  // The first row of each question, model and step.
  firstOfEach(rows) {
    const seen = new Set(), { source, step, question } = this.columns;
    return rows.filter((row) => {
      const key = `${source[row]} ${step[row]} ${question[row]}`;
      return !seen.has(key) && seen.add(key);
    });
  }

  // --- the list

  rowHeight() { return this.narrow.matches ? 58 : 38; }
  visibleRows() { return Math.ceil(this.rows.clientHeight / this.rowHeight()); }
  tall() { return this.view.length * this.rowHeight() > TALLEST; }

  layOut() {
    document.querySelector(".row.head").style.borderRightWidth = `${this.rows.offsetWidth - this.rows.clientWidth}px`; // as the scroll bar
    this.space.style.height = `${Math.min(this.view.length * this.rowHeight(), TALLEST)}px`;
    this.paint();
  }

  firstRow() {
    if (!this.tall()) return Math.floor(this.rows.scrollTop / this.rowHeight());
    const share = this.rows.scrollTop / (TALLEST - this.rows.clientHeight);
    return Math.round(share * Math.max(0, this.view.length - this.visibleRows() + 1));
  }

  paint() {
    const height = this.rowHeight(), first = Math.max(0, Math.min(this.firstRow(), this.view.length - 1));
    const top = this.tall() ? this.rows.scrollTop : first * height;
    const rows = [];
    for (let at = first; at < Math.min(first + this.visibleRows() + 1, this.view.length); at++) rows.push(this.row(at, top + (at - first) * height));
    this.space.replaceChildren(...rows);
    if (this.chosen >= 0) this.rows.setAttribute("aria-activedescendant", `row-${this.chosen}`); else this.rows.removeAttribute("aria-activedescendant");
  }

  row(at, top) {
    const { columns, index } = this, row = this.view[at];
    const [benchmark, id, text, reference] = index.questions[columns.question[row]];
    const verdict = index.verdicts[columns.verdict[row]], answer = index.answers[columns.answer[row]];
    const confidence = this.confidence[row];
    return make("div", { className: "row", id: `row-${at}`, role: "option", "data-at": String(at), "aria-selected": String(at === this.chosen),
      "aria-setsize": String(this.view.length), "aria-posinset": String(at + 1), style: { top: `${top}px` } },
    make("span", { className: `verdict ${verdict}` }, `${MARKS[verdict]} ${WORDS[verdict]}`, columns.truncated[row] ? make("span", { className: "cut", title: "cut off at the length limit" }, " cut") : null),
    make("span", { className: "question" }, make("bdi", {}, visible(text || id)), make("small", {}, ` ${visible(index.benchmarks[benchmark])}`)),
    make("span", { className: "answer" }, make("bdi", {}, answer === null ? "no answer" : visible(answer)),
      verdict === "wrong" ? make("small", {}, " not ", make("bdi", {}, visible(index.answers[reference] ?? ""))) : null),
    make("span", { className: "confidence" }, make("i", { style: { width: `${Number.isNaN(confidence) ? 0 : 100 * confidence}%` } }), make("b", {}, Number.isNaN(confidence) ? "–" : confidence.toFixed(3))),
    make("span", { className: "tokens" }, count(columns.tokens[row])));
  }

  choose(at, byPointer, first) {
    this.chosen = at;
    const height = this.rowHeight(), shown = this.visibleRows();
    if (!first) {
      if (this.tall()) {
        const from = this.firstRow();
        if (at < from || at >= from + shown - 1) this.rows.scrollTop = at / Math.max(1, this.view.length - shown + 1) * (TALLEST - this.rows.clientHeight);
      } else if (at * height < this.rows.scrollTop) this.rows.scrollTop = at * height;
      else if ((at + 1) * height > this.rows.scrollTop + this.rows.clientHeight) this.rows.scrollTop = (at + 1) * height - this.rows.clientHeight;
    }
    this.paint();
    this.show(this.view[at]);
    if (byPointer && this.narrow.matches) this.detail.scrollIntoView({ block: "start" });
  }

  // Show a row, in its place in the list if it is in there.
  jump(row) {
    const at = this.view.indexOf(row);
    if (at >= 0) this.choose(at, false); else { this.chosen = -1; this.paint(); this.show(row); }
  }

  // --- one response

  async show(row) {
    this.showing = row;
    const { columns, index } = this;
    const [[response, extracted], [prompt, reference]] = await Promise.all([this.responses.get(row), this.prompts.get(columns.question[row])]);
    if (this.showing !== row) return;
    const [benchmark, id] = index.questions[columns.question[row]];
    const verdict = index.verdicts[columns.verdict[row]], logprob = columns.logprob[row];
    const fact = (name, value) => make("div", {}, make("dt", {}, name), make("dd", {}, value));
    const maths = make("input", { type: "checkbox", checked: this.maths, id: "maths" });
    maths.addEventListener("change", () => { this.maths = maths.checked; this.show(row).then(() => document.getElementById("maths").focus()); });
    const back = make("button", { type: "button", className: "back" }, "↑ Back to the list");
    back.addEventListener("click", () => { this.rows.scrollIntoView({ block: "center" }); this.rows.focus({ preventScroll: true }); });
    this.detail.replaceChildren(
      make("header", {},
        make("p", { className: `badge ${verdict}` }, `${MARKS[verdict]} ${WORDS[verdict]}`),
        make("h3", {}, make("bdi", {}, visible(`${index.benchmarks[benchmark]} · ${id}`))), back),
      make("dl", { className: "facts" },
        fact("Model", visible(index.sources[columns.source[row]].name) + (index.sources[columns.source[row]].training ? `, step ${count(columns.step[row])}` : "")),
        fact("Confidence", Number.isNaN(this.confidence[row]) ? "–" : this.confidence[row].toFixed(4)),
        fact("Mean log-prob", Number.isNaN(logprob) ? "–" : `${logprob.toFixed(4).replace("-", "−")} nats`),
        fact("Tokens", count(columns.tokens[row]) + (columns.truncated[row] ? ", cut off" : "")),
        fact("Extracted answer", extracted === null ? "none" : this.inline(extracted)),
        fact("Reference answer", this.inline(reference))),
      this.siblings(row),
      make("div", { className: "texts" },
        make("label", { className: "switch", for: "maths" }, maths, "Render LaTeX"),
        make("h4", {}, "Question"), this.text(prompt, "prompt"),
        make("h4", {}, "Response"), this.text(response, "response")));
  }

  inline(text) {
    const found = make("bdi", { className: "inline" }, visible(text.length > 400 ? `${text.slice(0, 400)}…` : text));
    if (!this.maths || text.length > 400) return found;
    if (text.includes("$") || !/[\\^{]/.test(text)) typeset(found); else typesetFormula(found, text);
    return found;
  }

  text(whole, kind) {
    const box = make("div", { className: `text ${kind}`, dir: "auto" });
    const fill = (most) => {
      box.replaceChildren(visible(whole.slice(0, most)));
      if (this.maths && most <= SHOWN) typeset(box);
    };
    fill(SHOWN);
    if (whole === "") box.replaceChildren(make("em", { className: "muted" }, "empty"));
    if (whole.length <= SHOWN) return box;
    const more = make("button", { type: "button" }, `Show all ${count(whole.length)} characters`);
    more.addEventListener("click", () => { fill(Infinity); more.remove(); });
    return make("div", {}, box, more);
  }

  // The same model's other responses to the question by confidence, and the other models'.
  siblings(row) {
    const { columns, index } = this, same = [], others = new Map();
    for (let other = 0; other < index.rows; other++) {
      if (columns.question[other] !== columns.question[row]) continue;
      const source = columns.source[other];
      if (source === columns.source[row] && columns.step[other] === columns.step[row]) same.push(other);
      else if (!others.has(source) || this.confidence[other] > this.confidence[others.get(source)]) others.set(source, other);
    }
    const order = (list) => list.sort((a, b) => (this.confidence[b] || 0) - (this.confidence[a] || 0) || a - b);
    const button = (other, words) => {
      const verdict = index.verdicts[columns.verdict[other]];
      const found = make("button", { type: "button", className: `sibling ${verdict}`, "aria-current": String(other === row),
        "aria-label": `${words ?? "response"} ${WORDS[verdict]}, confidence ${short(this.confidence[other])}` }, `${MARKS[verdict]} ${words ?? (Number.isNaN(this.confidence[other]) ? "–" : this.confidence[other].toFixed(2))}`);
      found.addEventListener("click", () => this.jump(other));
      return found;
    };
    const parts = [];
    if (same.length > 1) {
      parts.push(make("h4", {}, `All ${count(same.length)} responses to this question, most confident first`),
        make("div", { className: "strip" }, ...order(same).slice(0, 256).map((other) => button(other))), this.ranking(same));
    }
    if (others.size) {
      parts.push(make("h4", {}, "Other models' most confident response"),
        make("div", { className: "strip" }, ...[...others].slice(0, 24).map(([source, other]) => button(other, visible(index.sources[source].name)))));
    }
    return make("div", { className: "siblings" }, ...parts);
  }

  ranking(rows) {
    const of = (verdict) => rows.filter((row) => this.index.verdicts[this.columns.verdict[row]] === verdict && !Number.isNaN(this.confidence[row])).map((row) => this.columns.logprob[row]);
    const right = of("correct"), wrong = of("wrong");
    if (!right.length || !wrong.length) return make("p", { className: "muted" }, "Not a mixed question: it has no part in AUC-mean.");
    let above = 0;
    for (const a of right) for (const b of wrong) above += a > b ? 1 : a === b ? 0.5 : 0;
    return make("p", { className: "muted" }, `AUC of this question: ${(above / right.length / wrong.length).toFixed(3)} (${right.length} right, ${wrong.length} wrong).`);
  }
}
