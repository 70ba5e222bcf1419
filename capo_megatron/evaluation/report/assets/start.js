"use strict";
// Helpers that the other scripts share, and the choice of the theme.

// The bytes in a script element made by samples.py.
async function unpack(id) {
  const text = atob(document.getElementById(id).textContent);
  const bytes = Uint8Array.from(text, (mark) => mark.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function unpackJson(id) {
  return JSON.parse(new TextDecoder().decode(await unpack(id)));
}

// An element with properties and children. Texts become text nodes: there is no way to pass markup.
function make(name, properties, ...children) {
  const found = document.createElement(name);
  for (const [key, value] of Object.entries(properties ?? {})) {
    if (key.includes("-") || key === "role" || key === "for") found.setAttribute(key, value);
    else if (key === "style") Object.assign(found.style, value);
    else found[key] = value;
  }
  found.append(...children.filter((child) => child !== null && child !== undefined));
  return found;
}

function draw(name, attributes, ...children) {
  const found = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes ?? {})) found.setAttribute(key, value);
  found.append(...children);
  return found;
}

// What cannot be seen, or turns the text around it, as an escape.
function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f\u202a-\u202e\u2066-\u2069]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g,
    (mark) => "\\u" + mark.charCodeAt(0).toString(16).padStart(4, "0"));
}

function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.0005 || size >= 1e7)) return value.toExponential(1).replaceAll("-", "−");
  return value.toLocaleString("en", size < 1000 ? { maximumSignificantDigits: 3 } : { maximumFractionDigits: 0 }).replace("-", "−");
}

const count = (value) => value.toLocaleString("en");

function seconds(value) {
  if (value < 60) return `${short(value)} s`;
  if (value < 3600) return `${short(value / 60)} min`;
  return `${short(value / 3600)} h`;
}

{
  const button = document.getElementById("theme");
  const root = document.documentElement;
  const order = ["auto", "light", "dark"];
  const say = () => { button.textContent = `Theme: ${root.dataset.theme ?? "auto"}`; };
  button.addEventListener("click", () => {
    const next = order[(order.indexOf(root.dataset.theme ?? "auto") + 1) % order.length];
    if (next === "auto") delete root.dataset.theme; else root.dataset.theme = next;
    try { localStorage.setItem("capo-theme", next); } catch { /* it then lasts until the page is closed */ }
    say();
  });
  say();
}
