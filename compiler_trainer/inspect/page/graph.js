// The text of a stage, with search and links from node to node.

const graph = { text: null, found: null, words: [], line: 0, list: null };
const rowLine = (i) => (graph.found ? graph.found[i] : i + 1);

function startGraph() {
  const lines = document.getElementById("lines"), search = document.getElementById("search");
  fillStages("graph-stage", (n) => go(`graph/${n}`));
  graph.list = new List(lines, (i) => {
    const n = rowLine(i), text = graph.text.line(n);
    const kind = n === graph.line ? " on" : text.startsWith("#") ? " head" : "";
    return `<div class="row${kind}" data-line="${n}"><i>${n}</i>${lineHtml(text, graph.words)}</div>`;
  });
  lines.addEventListener("click", (event) => {
    const name = event.target.closest("[data-name]")?.dataset.name, row = event.target.closest("[data-line]");
    if (name && graph.text.definitions.get(name) !== Number(row.dataset.line)) return visit(graph.text.definitions.get(name));
    if (row && !getSelection().toString()) choose(Number(row.dataset.line));
  });
  search.addEventListener("input", () => find(search.value));
  for (const place of [search, lines]) place.addEventListener("keydown", graphKey);
}

function graphKey(event) {
  const at = graph.found ? graph.found.indexOf(graph.line) : graph.line - 1;
  const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 25, PageUp: -25 }[event.key];
  if (step) {
    const next = Math.min(graph.list.count - 1, Math.max(0, at + step));
    if (graph.list.count) choose(rowLine(next)), graph.list.reach(next);
  } else if (event.key === "Enter" && graph.line) visit(graph.line);
  else if (event.key === "Escape") find((document.getElementById("search").value = ""));
  else return;
  event.preventDefault();
}

/** Show only the lines that contain all words, or all lines. */
function find(query) {
  const began = performance.now();
  graph.words = query.toLowerCase().split(/\s+/).filter(Boolean);
  graph.found = graph.words.length ? graph.text.search(query) : null;
  const kept = !graph.found || graph.found.includes(graph.line);
  if (!kept) graph.line = graph.found[0] ?? 0;
  graph.list.show(graph.found ? graph.found.length : graph.text.count, graph.found ? 0 : graph.line - 1);
  const took = performance.now() - began;
  const found = document.getElementById("found");
  found.textContent = graph.found ? `${number(graph.found.length)} of ${number(graph.text.count)} lines` : `${number(graph.text.count)} lines`;
  found.dataset.ms = took;
  if (!kept) setTimeout(() => choose(graph.line)); // first the lines, then the details of the first line
}

/** Go to a line of this stage, among all lines. */
function visit(line) {
  if (line) go(`graph/${graph.text.number}/${line}`);
}

async function showGraph(n, line) {
  n = n ?? main().number;
  graph.text = await openStage(n);
  document.getElementById("graph-stage").value = n;
  graph.line = line ?? 0;
  document.getElementById("search").value = "";
  find("");
  choose(graph.line);
}

/** Mark a line and show the details of its node. */
function choose(line) {
  graph.line = line;
  graph.list.draw();
  const aside = document.getElementById("node"), at = graph.text.number;
  const node = line ? parts(graph.text.line(line)) : null;
  aside.hidden = !node?.name;
  if (aside.hidden) return;
  const detail = run.programs.find((p) => p.number === at);
  const k = detail ? detail.memory.node.indexOf(node.name) : -1, sent = detail?.collectives.find((c) => c.node === node.name);
  const named = (n) => nodeLink(at, n, parts(graph.text.line(n)).name || graph.text.line(n).split(" = ")[0]);
  const operands = [...new Set([...node.call.matchAll(/%(\w+)/g)].map((m) => m[1]))].map((name) => graph.text.definitions.get(name)).filter(Boolean);
  const users = graph.text.users(node.name), facts = [
    ["operator", escapeHtml(node.op)], ["value", escapeHtml(node.value)], ["placement", escapeHtml(node.spec)],
    ["source", node.source && `<a data-find="${escapeHtml(node.source)}">${escapeHtml(node.source)}</a>`],
    ["module", node.module && `<a data-find="${escapeHtml(node.module)}">${escapeHtml(node.module)}</a>`],
    ["phase", escapeHtml(node.phase) + (node.recomputed ? ", recomputed" : "")],
    ["memory", k >= 0 && `${bytes(detail.memory.bytes[k])} of ${escapeHtml(detail.kinds[detail.memory.kind[k]])}, until line <a href="${stageLink(at, detail.memory.last[k])}">${detail.memory.last[k]}</a>`],
    ["sends", sent && `${bytes(sent.sent_bytes)} over ${escapeHtml(sent.axis)}`],
  ];
  aside.innerHTML = `<h3 class="mono">%${escapeHtml(node.name)}</h3><dl>${facts.filter((f) => f[1]).map(([t, d]) => `<dt>${t}</dt><dd>${d}</dd>`).join("")}</dl>` +
    nodeList("reads", operands, named) + nodeList("read by", users, named);
  for (const a of aside.querySelectorAll("[data-find]")) a.onclick = () => find((document.getElementById("search").value = a.dataset.find));
}

function nodeList(title, lines, named) {
  if (!lines.length) return "";
  const more = lines.length > 40 ? `<li class="quiet">and ${number(lines.length - 40)} more</li>` : "";
  return `<p class="quiet">${title} ${number(lines.length)}</p><ul>${lines.slice(0, 40).map((n) => `<li>${named(n)}</li>`).join("")}${more}</ul>`;
}
