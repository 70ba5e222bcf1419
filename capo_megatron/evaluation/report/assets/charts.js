"use strict";
// Charts as SVG, drawn again when their width changes. Colours are classes, so that a theme recolours them.

const DASHES = ["", "6 3", "2 3", "8 3 2 3", "1 2", "10 4"];

// Round numbers that divide [low, high] into about `wanted` parts.
function ticks(low, high, wanted) {
  const raw = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const off = (size) => Math.abs(Math.log(size / raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).reduce((best, size) => (off(size) < off(best) ? size : best));
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + 1e-9 * step; index++) found.push(index * step || 0);
  return found;
}

const ruler = document.createElement("canvas").getContext("2d");

// Pixels that the longest of some labels takes.
function widest(texts) {
  ruler.font = `600 12px ${getComputedStyle(document.body).fontFamily}`;
  return Math.max(...texts.map((text) => ruler.measureText(text).width));
}

function bounds(values, pad) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low === Infinity) return [0, 1];
  if (low === high) { const around = Math.abs(low) * 0.1 || 0.5; return [low - around, high + around]; }
  return [low - pad * (high - low), high + pad * (high - low)];
}

// Places as near as possible to those wanted, at least `gap` apart, within [low, high].
function spread(places, gap, low, high) {
  const order = places.map((_, index) => index).sort((a, b) => places[a] - places[b]);
  const found = [...places];
  order.forEach((index, rank) => {
    if (rank > 0) found[index] = Math.max(found[index], found[order[rank - 1]] + gap);
  });
  let limit = high;
  for (const index of order.reverse()) { found[index] = Math.max(low, Math.min(found[index], limit)); limit = found[index] - gap; }
  return found;
}

// A figure with a heading, a drawing that follows its width, and its numbers as a table.
function figure({ title, unit, wide, paint, table, note, label }) {
  const box = make("div", { className: "drawing" });
  const found = make("figure", { className: wide ? "chart wide" : "chart" },
    make("figcaption", {}, make("strong", {}, title), unit ? make("span", { className: "muted" }, unit) : null), box,
    note ? make("p", { className: "muted note" }, note) : null);
  if (table) {
    const details = make("details", { className: "numbers" }, make("summary", {}, "Numbers"));
    details.addEventListener("toggle", () => {
      if (!details.open || details.children.length > 1) return;
      const [head, rows] = table();
      details.append(make("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": `${title}: numbers` }, make("table", {},
        make("thead", {}, make("tr", {}, ...head.map((cell) => make("th", { scope: "col" }, cell)))),
        make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell, at) => make(at ? "td" : "th", {}, cell))))))));
    });
    found.append(details);
  }
  let width = 0;
  new ResizeObserver(() => {
    const now = Math.floor(box.clientWidth);
    if (!now || now === width) return;
    width = now;
    box.replaceChildren(...[paint(width)].flat());
    const image = box.querySelector("svg");
    image.setAttribute("role", "img");
    image.setAttribute("aria-label", label ? `${title}. ${label}` : title);
  }).observe(box);
  return found;
}

// Axes with a grid; returns the SVG, the scales, and the group to draw in.
function axes(width, height, x, y, margin, { xLabel, xFormat = short, yFormat = short, yTicks = 4.5, zero, xTicks } = {}) {
  const image = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  const right = width - margin.right, bottom = height - margin.bottom;
  const sx = (value) => margin.left + (value - x[0]) / (x[1] - x[0]) * (right - margin.left);
  const sy = (value) => bottom - (value - y[0]) / (y[1] - y[0]) * (bottom - margin.top);
  for (const tick of ticks(y[0], y[1], yTicks)) {
    image.append(draw("line", { class: tick === zero ? "axis" : "grid", x1: margin.left, x2: right, y1: sy(tick), y2: sy(tick) }));
    image.append(draw("text", { class: "tick", x: margin.left - 6, y: sy(tick) + 4, "text-anchor": "end" }, yFormat(tick)));
  }
  for (const tick of xTicks ?? ticks(x[0], x[1], Math.max(2, Math.min(6, (right - margin.left) / 60)))) {
    image.append(draw("line", { class: "axis", x1: sx(tick), x2: sx(tick), y1: bottom, y2: bottom + 4 }));
    image.append(draw("text", { class: "tick", x: sx(tick), y: bottom + 17, "text-anchor": "middle" }, xFormat(tick)));
  }
  image.append(draw("line", { class: "axis", x1: margin.left, x2: right, y1: bottom, y2: bottom }));
  if (xLabel) image.append(draw("text", { class: "tick label", x: (margin.left + right) / 2, y: height - 2, "text-anchor": "middle" }, xLabel));
  return { image, sx, sy, right, bottom };
}

const path = (xs, ys, sx, sy) => xs.map((x, at) => `${at ? "L" : "M"}${sx(x).toFixed(1)} ${sy(ys[at]).toFixed(1)}`).join("");

// Lines over one x axis, each with its name and last value at its end, or below where there is no room.
function lineChart({ title, unit, lines, xLabel, wide, yFormat = short, dots, xFormat, height = 210, note }) {
  const many = lines.length > 1;
  const ends = lines.map((line) => `${many ? `${line.name} ` : ""}${yFormat(line.y.at(-1))}`);
  const paint = (width) => {
    const room = widest(ends) + 16;
    const beside = room < width * 0.36 && lines.length <= 8;
    const x = bounds(lines.flatMap((line) => line.x), 0);
    const y = bounds(lines.flatMap((line) => [...line.y, ...(line.low ?? []), ...(line.high ?? [])]), 0.06);
    const margin = { left: 46, right: beside ? room : 14, top: 10, bottom: xLabel ? 36 : 24 };
    const { image, sx, sy, right, bottom } = axes(width, height, x, y, margin, { xLabel, yFormat, xFormat });
    for (const line of lines) {
      const colour = `c${line.colour}`;
      if (line.low && lines.length <= 4) {
        const back = [...line.x].reverse(), high = [...line.high].reverse();
        image.append(draw("path", { class: `band ${colour}`, d: `${path(line.x, line.low, sx, sy)}L${path(back, high, sx, sy).slice(1)}Z` }));
      }
      image.append(draw("path", { class: `line ${colour}`, "stroke-dasharray": DASHES[(line.dash ?? 0) % DASHES.length], d: path(line.x, line.y, sx, sy) }));
      if (dots ?? line.x.length <= 16) {
        line.x.forEach((at, index) => image.append(draw("circle", { class: `dot ${colour}`, r: 2.4, cx: sx(at), cy: sy(line.y[index]) })));
      }
    }
    const parts = [image];
    if (beside) {
      const places = spread(lines.map((line) => sy(line.y.at(-1)) + 4), 15, 14, bottom + 4);
      lines.forEach((line, index) => {
        const end = sx(line.x.at(-1));
        image.append(draw("path", { class: `lead c${line.colour}`, d: `M${end + 2} ${sy(line.y.at(-1))}L${right + 7} ${places[index] - 4}` }));
        image.append(draw("text", { class: `name c${line.colour}`, x: right + 10, y: places[index] }, ends[index]));
      });
    } else {
      parts.push(legend(lines, ends));
    }
    parts.push(follow(image, lines, { sx, sy, bottom, top: margin.top, yFormat, xFormat: xFormat ?? short, xLabel }));
    return parts;
  };
  return figure({ title, unit, wide, paint, note, label: ends.join(", "), table: () => numbersOf(lines, xLabel ?? "x") });
}

function legend(lines, texts) {
  return make("ul", { className: "legend" }, ...lines.map((line, index) => {
    const key = draw("svg", { width: 22, height: 10, "aria-hidden": "true" },
      draw("line", { class: `line c${line.colour}`, "stroke-dasharray": DASHES[(line.dash ?? 0) % DASHES.length], x1: 0, x2: 22, y1: 5, y2: 5 }));
    return make("li", {}, key, texts[index]);
  }));
}

// A line under the pointer (or moved by the arrow keys) with the values there.
function follow(image, lines, { sx, sy, bottom, top, yFormat, xFormat, xLabel }) {
  const tip = make("div", { className: "tip", hidden: true });
  const rule = draw("line", { class: "rule", y1: top, y2: bottom, visibility: "hidden" });
  image.append(rule);
  image.setAttribute("tabindex", "0");
  const xs = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  let at = xs.length - 1;
  const show = () => {
    const x = xs[at], place = sx(x);
    rule.setAttribute("x1", place); rule.setAttribute("x2", place); rule.setAttribute("visibility", "visible");
    const rows = lines.flatMap((line) => {
      const index = line.x.indexOf(x);
      return index < 0 ? [] : [make("div", {}, make("span", { className: `swatch c${line.colour}` }), line.name ? `${line.name} ` : "", make("strong", {}, yFormat(line.y[index])))];
    });
    tip.replaceChildren(make("div", { className: "muted" }, `${xLabel ? `${xLabel} ` : ""}${xFormat(x)}`), ...rows);
    tip.hidden = false;
    const width = Number(image.getAttribute("width"));
    tip.style.left = `${Math.max(0, Math.min(place + 12, width - tip.offsetWidth - 2))}px`;
    if (place + 12 + tip.offsetWidth > width) tip.style.left = `${Math.max(0, place - 12 - tip.offsetWidth)}px`;
    tip.style.top = `${top}px`;
  };
  const hide = () => { tip.hidden = true; rule.setAttribute("visibility", "hidden"); };
  image.addEventListener("pointermove", (event) => {
    const place = event.clientX - image.getBoundingClientRect().left;
    let best = 0;
    xs.forEach((x, index) => { if (Math.abs(sx(x) - place) < Math.abs(sx(xs[best]) - place)) best = index; });
    at = best; show();
  });
  image.addEventListener("pointerleave", hide);
  image.addEventListener("focus", () => { if (image.matches(":focus-visible")) show(); });
  image.addEventListener("blur", hide);
  image.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    at = Math.max(0, Math.min(xs.length - 1, at + move)); show();
  });
  return tip;
}

function numbersOf(lines, xLabel) {
  const xs = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const maps = lines.map((line) => new Map(line.x.map((x, index) => [x, line.y[index]])));
  return [[xLabel, ...lines.map((line) => line.name || "value")], xs.map((x) => [short(x), ...maps.map((found) => short(found.get(x)))])];
}

// Accuracy across, AUC-mean up: where training takes a model. An open circle is its start, a full one its end.
function trajectoryChart(lines) {
  const paint = (width) => {
    const height = 270, names = lines.map((line) => line.name);
    const room = widest(names) + 16, beside = room < width * 0.36;
    const margin = { left: 46, right: beside ? room : 16, top: 12, bottom: 36 };
    const x = bounds(lines.flatMap((line) => line.x), 0.05), y = bounds(lines.flatMap((line) => line.y), 0.08);
    const { image, sx, sy } = axes(width, height, x, y, margin, { xLabel: "validation accuracy", xFormat: percentText });
    const places = spread(lines.map((line) => sy(line.y.at(-1)) + 4), 15, 14, height - margin.bottom);
    lines.forEach((line, index) => {
      const colour = `c${line.colour}`, end = [sx(line.x.at(-1)), sy(line.y.at(-1))];
      image.append(draw("path", { class: `line ${colour}`, d: path(line.x, line.y, sx, sy) }));
      line.x.forEach((at, step) => {
        const dot = draw("circle", { class: `dot ${colour}`, r: 2.6, cx: sx(at), cy: sy(line.y[step]) }, draw("title", {}, `${line.name}, step ${line.step[step]}: accuracy ${short(at)}, AUC-mean ${short(line.y[step])}`));
        image.append(dot);
      });
      image.append(draw("circle", { class: `open ${colour}`, r: 5, cx: sx(line.x[0]), cy: sy(line.y[0]) }));
      image.append(draw("circle", { class: `dot ${colour}`, r: 5.5, cx: end[0], cy: end[1] }));
      if (beside) image.append(draw("text", { class: `name ${colour}`, x: end[0] + 10, y: places[index] }, line.name));
    });
    return beside ? [image] : [image, legend(lines, names)];
  };
  const table = () => [["run", "step", "accuracy", "AUC-mean"], lines.flatMap((line) => line.x.map((x, at) => [line.name, short(line.step[at]), short(x), short(line.y[at])]))];
  return figure({ title: "AUC-mean over accuracy", unit: "validation, ○ start to ● end: up and to the right is better", paint, table });
}

const percentText = (value) => `${short(100 * value)} %`;

// Accuracy over confidence in 20 bins; the size of a dot is the share of responses in it.
function reliabilityChart(found) {
  const paint = (width) => {
    const height = Math.min(width, 290);
    const margin = { left: 46, right: 14, top: 10, bottom: 36 };
    const { image, sx, sy } = axes(width, height, [0, 1.04], [0, 1.06], margin, { xLabel: "confidence" });
    image.append(draw("line", { class: "diagonal", x1: sx(0), y1: sy(0), x2: sx(1), y2: sy(1) }));
    for (const [confidence, accuracy, share] of found.reliability) {
      const place = { x: sx(confidence), y: sy(accuracy) };
      image.append(draw("line", { class: `gap c${found.colour}`, x1: place.x, x2: place.x, y1: place.y, y2: sy(confidence) }));
      image.append(draw("circle", { class: `dot c${found.colour}`, cx: place.x, cy: place.y, r: 2 + 13 * Math.sqrt(share) },
        draw("title", {}, `confidence ${short(confidence)}, accuracy ${short(accuracy)}, ${percentText(share)} of responses`)));
    }
    image.append(draw("text", { class: "tick", x: sx(0.03), y: sy(0.93) }, "underconfident"));
    image.append(draw("text", { class: "tick", x: sx(0.97), y: sy(0.04), "text-anchor": "end" }, "overconfident"));
    return image;
  };
  const table = () => [["confidence", "accuracy", "share of responses"], found.reliability.map((row) => row.map(short))];
  return figure({ title: `Reliability of ${found.name}`, unit: `accuracy over confidence, ECE ${short(found.ece)}`, paint, table });
}

// Right answers upwards, wrong ones downwards, over the mean log-prob, on a scale that is wider near zero.
function histogramChart(found, most) {
  const { edges, right, wrong } = found.histogram;
  const bend = (value) => -Math.sqrt(-value);
  const paint = (width) => {
    const height = 250, margin = { left: 46, right: 14, top: 10, bottom: 36 };
    const fitting = [];
    for (const tick of [0, -0.001, -0.01, -0.05, -0.1, -0.2, -0.5, -1, -2, -4, -8, -16]) {
      const place = (bend(tick) / bend(edges[0])) * (width - 60);
      if (tick >= edges[0] && (!fitting.length || place - fitting.at(-1).place > 34)) fitting.push({ tick, place });
    }
    const { image, sx: straight, sy, right: end } = axes(width, height, [bend(edges[0]), 0], [-most, most], margin,
      { xLabel: "mean log-prob per token, nats", xTicks: fitting.map(({ tick }) => bend(tick) || 0), xFormat: (value) => short(value ? -(value ** 2) : 0),
        yFormat: (value) => percentText(Math.abs(value)), zero: 0 });
    const sx = (value) => straight(bend(value));
    right.forEach((share, index) => {
      const x = sx(edges[index]) + 0.5, size = Math.max(sx(edges[index + 1]) - sx(edges[index]) - 1, 1);
      const bar = (value, kind) => draw("rect", { class: kind, x, width: size, y: Math.min(sy(0), sy(value)), height: Math.abs(sy(value) - sy(0)) },
        draw("title", {}, `${short(edges[index])} to ${short(edges[index + 1])} nats: ${percentText(Math.abs(value))} ${kind}`));
      if (share) image.append(bar(share, "right"));
      if (wrong[index]) image.append(bar(-wrong[index], "wrong"));
    });
    image.append(draw("line", { class: "axis", x1: margin.left, x2: end, y1: sy(0), y2: sy(0) }));
    image.append(draw("text", { class: "side right", x: margin.left + 8, y: margin.top + 12 }, `✓ right (${percentText(found.accuracy)})`));
    image.append(draw("text", { class: "side wrong", x: margin.left + 8, y: height - margin.bottom - 8 }, `✕ wrong (${percentText(1 - found.accuracy)})`));
    return image;
  };
  const table = () => [["from", "to", "right", "wrong"], right.map((share, at) => [short(edges[at]), short(edges[at + 1]), percentText(share), percentText(wrong[at])])];
  return figure({ title: `Log-probs of ${found.name}`, unit: "shares of the right and of the wrong responses", paint, table });
}

// One bar per run, cut into phases.
function timingChart(runs) {
  const phases = [...new Set(runs.flatMap((run) => Object.keys(run.seconds)))];
  const rows = runs.map((run) => {
    const total = Object.values(run.seconds).reduce((sum, value) => sum + value, 0);
    const bar = make("div", { className: "bar" }, ...Object.entries(run.seconds).map(([phase, value]) =>
      make("div", { className: `part p${phases.indexOf(phase) % 7}`, style: { flexGrow: value / total }, title: `${phase}: ${seconds(value)}` },
        make("span", {}, `${phase} ${Math.round(100 * value / total)} %`))));
    const key = make("ul", { className: "legend" }, ...Object.entries(run.seconds).map(([phase, value]) =>
      make("li", {}, make("span", { className: `swatch p${phases.indexOf(phase) % 7}` }), `${phase} ${(100 * value / total).toFixed(1)} %`)));
    return make("div", { className: "timing" }, make("p", {}, make("strong", {}, run.name), ` ${seconds(total)} in ${count(run.steps)} steps`), bar, key);
  });
  const speeds = [...new Set(runs.flatMap((run) => Object.keys(run.throughput)))];
  const table = () => [["phase", ...runs.map((run) => run.name)], [
    ...phases.map((phase) => [`${phase}, seconds per step`, ...runs.map((run) => short(run.seconds[phase] === undefined ? null : run.seconds[phase] / run.steps))]),
    ...speeds.map((phase) => [`${phase}, tokens per second`, ...runs.map((run) => short(run.throughput[phase]))]),
  ]];
  const found = figure({ title: "Phases", unit: "share of the run's time, and speeds below", wide: true, paint: () => draw("svg", { width: 0, height: 0 }), table });
  found.querySelector(".drawing").replaceWith(...rows);
  return found;
}

function fill(name, charts, otherwise) {
  const box = document.querySelector(`[data-charts="${name}"]`);
  if (charts.length) box.append(...charts); else box.replaceWith(make("p", { className: "empty" }, otherwise));
}

async function drawCharts() {
  const data = await unpackJson("charts");
  const over = (found) => found.map(({ title, unit, lines }) => lineChart({
    title, unit, lines: lines.map((line) => ({ ...line, name: line.name })), xLabel: "step" }));
  const evaluations = data.evaluations.filter((found) => found.reliability.length);
  const most = Math.max(0.01, ...evaluations.flatMap((found) => [...found.histogram.right, ...found.histogram.wrong]));
  const covered = evaluations.filter((found) => found.coverage).map((found, index) => ({ name: found.name, colour: found.colour, dash: index % DASHES.length, ...found.coverage }));
  fill("calibration", [
    ...(covered.length ? [lineChart({ title: "Precision over coverage", unit: "accuracy of the most confident responses", lines: covered,
      xLabel: "share of responses kept", dots: false, xFormat: percentText, yFormat: percentText, wide: true, height: 260 })] : []),
    ...evaluations.map(reliabilityChart),
    ...evaluations.map((found) => histogramChart(found, most)),
  ], "There are no evaluation records with log-probs.");
  fill("training", [...(data.trajectories.length ? [trajectoryChart(data.trajectories)] : []), ...over(data.curves)], "There are no training metrics.");
  fill("mask", over(data.masks), "Nothing was masked, and no reference was asked.");
  fill("time", data.timings.length ? [timingChart(data.timings)] : [], "No times were logged.");
}
