"use strict";
// The data of the page: a summary, read at once, and the text of each stage, unpacked when first shown.

let run; // the summary, as compiler_trainer/inspect/render.py writes it
const opened = new Map();

async function unpack(id) {
  const packed = atob(document.getElementById(id).textContent);
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

/** Return the text of a stage, with the starts of its lines; it is unpacked once. */
function openStage(number) {
  if (!opened.has(number)) opened.set(number, unpack(`text-${number}`).then((text) => new Text(text, number)));
  return opened.get(number);
}

class Text {
  constructor(text, number) {
    this.text = text;
    this.lower = text.toLowerCase();
    this.number = number;
    const starts = [0];
    for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) starts.push(at + 1);
    this.starts = starts; // the start of every line, and the end
    this.count = starts.length - 1;
  }

  /** Return line `n`, counting from 1. */
  line(n) {
    return this.text.slice(this.starts[n - 1], this.starts[n] - 1);
  }

  /** Return the line that contains a position, not before line `from`. */
  lineAt(position, from = 1) {
    let low = from, high = this.count;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle - 1] <= position) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** Return the numbers of the lines that contain every word of a query, in any case. */
  search(query) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean).sort((a, b) => b.length - a.length);
    const found = [];
    if (!words.length) return found;
    let line = 1;
    for (let at = this.lower.indexOf(words[0]); at >= 0; at = this.lower.indexOf(words[0], this.starts[line])) {
      line = this.lineAt(at, line);
      const start = this.starts[line - 1], end = this.starts[line];
      const has = (word) => { const i = this.lower.indexOf(word, start); return i >= 0 && i < end; };
      if (words.length === 1 || words.slice(1).every(has)) found.push(line);
      if (line >= this.count) break;
    }
    return found;
  }

  /** Return the line that defines each node, by name; later definitions belong to graphs that operators call. */
  get definitions() {
    if (!this.defined) {
      this.defined = new Map();
      for (let n = 1; n <= this.count; n++) {
        const start = this.starts[n - 1];
        if (this.text[start] !== "%") continue;
        const name = this.text.slice(start + 1, this.text.indexOf(" ", start));
        if (!this.defined.has(name)) this.defined.set(name, n);
      }
    }
    return this.defined;
  }

  /** Return the lines that read a node. */
  users(name) {
    const found = [];
    for (let at = this.text.indexOf(`%${name}`); at >= 0; at = this.text.indexOf(`%${name}`, at + 1)) {
      if (/\w/.test(this.text[at + name.length + 1] ?? "")) continue;
      const line = this.lineAt(at);
      if (at !== this.starts[line - 1] && found[found.length - 1] !== line) found.push(line);
    }
    return found;
  }
}

/** Return the parts of a line: `%name = call : value spec   # source module phase`. */
function parts(line) {
  const hash = line.lastIndexOf("   # ");
  const body = hash < 0 ? line : line.slice(0, hash), words = hash < 0 ? [] : line.slice(hash + 5).split(" ");
  const [, name = "", rest = ""] = /^%(\S+) = (.*)$/.exec(body) ?? [];
  const colon = rest.lastIndexOf(" : ");
  const call = colon < 0 ? rest : rest.slice(0, colon), placed = colon < 0 ? "" : rest.slice(colon + 3);
  const [, value, spec = ""] = /^(\w+\[[^\]]*\])(?: (\[.*))?$/.exec(placed) ?? [null, placed];
  const recomputed = words[words.length - 1] === "recomputed" && Boolean(words.pop());
  const phase = words.pop() ?? "", source = /:\d+$/.test(words[0] ?? "") ? words.shift() : "";
  return { name, call, op: call.split(/[ (]/)[0], value, spec, source, module: words.join(" "), phase, recomputed };
}

// ---- words and numbers ----

const escapeHtml = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const number = (n) => Number(n).toLocaleString("en-US");

function scaled(n, step, units) {
  let i = 0;
  for (; n >= step && i < units.length - 1; i++) n /= step;
  return `${i && n < 100 ? n.toPrecision(3) : number(Math.round(n))} ${units[i]}`;
}
const bytes = (n) => scaled(n, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
const flops = (n) => (n ? scaled(n, 1000, ["", "K", "M", "G", "T", "P", "E"]).trim() : "");
const ms = (n) => (n >= 1000 ? `${(n / 1000).toPrecision(3)} s` : n >= 1 ? `${n.toPrecision(3)} ms` : `${(1000 * n).toPrecision(3)} µs`);

const stageLink = (n, line) => `#graph/${n}${line ? `/${line}` : ""}`;
const nodeLink = (n, line, name) => `<a class="mono" href="${stageLink(n, line)}">%${escapeHtml(name)}</a>`;

const KINDS = {
  parameters: "#5b8fd9", optimizer: "#8a7fd0", gradients: "#c77dbb", activations: "#e0a04a", communication: "#d9655b",
  backward: "#5fb3a1", update: "#8fae5d", batch: "#9aa5b1", buffers: "#b39c7d",
  carried: "#d8b26e", "kept for other programs": "#e0a04a", "state of other programs": "#8a7fd0",
  "buffers of receives": "#d9655b", "tensors being sent": "#c98a6b",
};
const colour = (kind) => (Object.hasOwn(KINDS, kind) ? KINDS[kind] : "#9aa5b1");
const AXES = ["#d9655b", "#e0a04a", "#8a7fd0", "#5fb3a1", "#c77dbb", "#8fae5d"];
