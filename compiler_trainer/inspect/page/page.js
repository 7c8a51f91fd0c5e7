// The frame: tabs, addresses (#graph/10/2345), the first page.

const TABS = { run: showRun, overview: showOverview, graph: showGraph, diff: showDiff, reshards: showReshards, memory: showMemory, communication: showCommunication, pipeline: showPipeline, experts: showExperts, sharding: showSharding };
const main = () => run.programs[run.programs.length - 1] ?? run.stages[run.stages.length - 1];

/** Fill a select with stages. */
function fillSelect(id, stages, chosen) {
  const select = document.getElementById(id);
  select.innerHTML = stages.map((s) => `<option value="${s.number}">${escapeHtml(s.title)}</option>`).join("");
  select.addEventListener("change", () => chosen(Number(select.value)));
}
const fillStages = (id, chosen) => fillSelect(id, run.stages, chosen);
const fillPrograms = (id, chosen) => fillSelect(id, run.programs, chosen);

function go(address) {
  location.hash = address;
}

/** Show the tab in the address, which is followed by numbers or a name. */
async function route() {
  const [tab, ...rest] = decodeURIComponent(location.hash.slice(1)).split("/");
  const name = TABS[tab] ? tab : "run";
  for (const section of document.querySelectorAll("section")) section.hidden = section.id !== name;
  document.getElementById("tabs").innerHTML = Object.keys(TABS).map((t) => `<a href="#${t}" class="${t === name ? "on" : ""}">${t}</a>`).join("");
  await TABS[name](...(name === "sharding" ? [rest.join("/")] : rest.map(Number)));
  document.body.dataset.shown = location.hash;
}

function showOverview() {
  const { reshard, peak, exposed } = run.glance;
  document.getElementById("overview").innerHTML = `<h2>At a glance</h2>` +
    `<div class="cards">${reshard ? reshardCard(reshard) : ""}${peak ? peakCard(peak) : ""}${exposed ? exposedCard(exposed) : ""}</div>` +
    [[peak, "No program of this run trains."], [reshard, "No reshards: no value changes its placement."], [exposed, "No collectives: ranks send each other nothing."]]
      .filter(([answer]) => !answer).map(([, why]) => `<p>${why}</p>`).join("") + passesHtml() + programHtml();
}

function card(id, question, big, text, link) {
  return `<div class="card" id="${id}"><h3>${question}</h3><div class="big mono">${big}</div>${text.map((t) => `<p>${t}</p>`).join("")}<p>${link}</p></div>`;
}

function reshardCard(r) {
  const question = "Which operator caused the largest reshard?";
  const others = r.as_large ? `, as for ${r.as_large} other${r.as_large > 1 ? "s" : ""}` : "";
  return card("glance-reshard", question, `${bytes(r.sent_bytes)} after %${escapeHtml(r.node)}`, [
    `sent by each rank in the forward${others}. <span class="quiet">${escapeHtml([r.of, r.source, r.module].filter(Boolean).join(" · "))}</span>`,
    `<span class="mono">${escapeHtml(r.before)} → ${escapeHtml(r.after)}</span><br>${escapeHtml(r.reason)}`,
  ], `<a href="${stageLink(r.stage, r.line)}">in the graph</a> · <a href="#reshards">all reshards</a>`);
}

function peakCard(p) {
  const question = "What is alive at the peak of memory?";
  const bar = p.kinds.map(([kind, n]) => `<span title="${escapeHtml(kind)} ${bytes(n)}" style="width:${(100 * n) / p.bytes}%;background:${colour(kind)}"></span>`).join("");
  const rows = p.alive.map((s) => `<tr><td class="n">${bytes(s.bytes)}</td><td>${nodeLink(p.stage, s.line, s.node)}</td><td class="wrap quiet">${escapeHtml([s.kind, s.value, s.source, s.module].filter(Boolean).join(" · "))}</td></tr>`);
  return card("glance-peak", question, bytes(p.bytes), [
    `at ${nodeLink(p.stage, p.line, p.node)} <span class="quiet">${escapeHtml([p.source, p.module].filter(Boolean).join(" · "))}</span>, of which ${p.kinds.slice(0, 3).map(([kind, n]) => `${escapeHtml(kind)} ${bytes(n)}`).join(", ")}`,
    `<span class="stack">${bar}</span>`, `<table>${rows.join("")}</table>`,
    `<span class="quiet">By source line:</span> ${p.lines.map(([source, n, count]) => `${escapeHtml(source)} ${bytes(n)} <span class="quiet">in ${number(count)}</span>`).join(", ")}`,
  ], `<a href="#memory/${p.stage}/${p.line}">along the step</a>`);
}

function exposedCard(e) {
  const question = "Which collective is exposed?";
  const what = `${escapeHtml(e.kind)} over ${escapeHtml(e.axis)}, ${bytes(e.sent_bytes)} sent`, from = escapeHtml([e.source, e.module, e.phase].filter(Boolean).join(" · "));
  const links = `<a href="${stageLink(e.stage, e.line)}">in the graph</a> · <a href="#communication/${e.stage}">all collectives</a>`;
  if (e.exposed_ms !== null) {
    const text = e.exposed_ms ? `the computation waits for it, and <b>${ms(e.all_ms)}</b> for all collectives` : "the computation never waits";
    return card("glance-exposed", question, e.exposed_ms ? `${ms(e.exposed_ms)} at %${escapeHtml(e.node)}` : "none", [`${what}: ${text}, as predicted. <span class="quiet">${from}</span>`], links);
  }
  const hidden = e.between ? `only ${number(e.between)} operators are between it and the wait for it` : "the wait for it comes at once, so nothing hides it";
  return card("glance-exposed", question, `%${escapeHtml(e.node)}`, [
    `<b>${what}</b>: ${hidden}. <span class="quiet">${from}</span>`,
    `<span class="quiet">In the order of the graph, ${number(e.bare)} of ${number(e.count)} collectives have nothing to overlap with. Times are predicted by a dry run (<code>run.dry=true cluster=h100</code>).</span>`,
  ], links);
}

function passesHtml() {
  const most = Math.max(1e-9, ...run.stages.map((s) => s.seconds ?? 0));
  const columns = [
    ["nodes before", "nodes_before", number], ["after", "nodes_after", number], ["collectives", "collectives", number],
    ["sent by a rank", "sent_bytes", bytes], ["casts", "casts", number], ["masks", "masks", number],
    ["FLOPs", "flops", flops], ["recomputed", "recomputed_flops", flops], ["peak memory", "peak_bytes", bytes],
  ].filter(([, key]) => run.stages.some((s) => s[key]));
  const rows = run.stages.map((s) => `<tr><td><a href="#graph/${s.number}">${escapeHtml(s.title)}</a></td>` +
    `<td class="wrap does">${escapeHtml(s.does)}${s.number ? ` <a href="#diff/${s.number - 1}/${s.number}">diff</a>` : ""}<br><span class="quiet">${s.counts.map(countHtml).join(", ")}</span></td>` +
    `<td class="n">${s.seconds === null ? "" : s.seconds.toFixed(2)}</td><td><span class="meter" style="width:${(60 * (s.seconds ?? 0)) / most}px"></span></td>` +
    columns.map(([, key, of]) => `<td class="n">${s[key] ? of(s[key]) : ""}</td>`).join("") + "</tr>");
  const heads = columns.map(([head]) => `<th class="n">${head}</th>`).join("");
  return `<h2>Passes</h2><p class="quiet">Each pass rewrites the graph of a program (forward, step, evaluate). Bytes and FLOPs are of one rank once the graph is sharded.${run.folded ? ` While passes ran, ${escapeHtml(run.folded)}; costs are of all layers, nodes of those that stand.` : ""}</p>` +
    `<div class="table"><table id="passes"><thead><tr><th>pass</th><th>what it does, and how often</th><th class="n">seconds</th><th></th>${heads}</tr></thead><tbody>${rows.join("")}</tbody></table></div>`;
}

/** Return the counts of a pass: `view 12`, `all gather 97 → 31`. */
function countHtml([what, before, now]) {
  const of = /saved|offloaded/.test(what) ? bytes : number;
  return `${escapeHtml(what)} ${before === null ? "" : `${of(before)} → `}${of(now)}`;
}

function programHtml() {
  const config = Object.entries(run.config).map(([key, value]) => `<tr><td class="mono">${escapeHtml(key)}</td><td class="mono wrap">${escapeHtml(JSON.stringify(value))}</td></tr>`);
  const notes = run.stages.filter((s) => s.notes.length).map((s) => `<details><summary>${escapeHtml(s.title)}: ${number(s.notes.length)} notes</summary><pre class="mono">${s.notes.map(escapeHtml).join("\n")}</pre></details>`);
  return `<h2>Notes of the passes</h2>${notes.join("")}<h2>Options</h2><details><summary>${number(config.length)} options</summary><div class="table"><table>${config.join("")}</table></div></details>`;
}

function showReshards() {
  const rows = run.reshards.slice(0, 1000).map((r) => `<tr><td class="n">${r.sent_bytes ? bytes(r.sent_bytes) : "0"}</td><td><a class="mono" href="${stageLink(r.stage, r.line)}">%${escapeHtml(r.node)}</a></td><td class="mono">${escapeHtml(r.before)}</td><td>→</td><td class="mono">${escapeHtml(r.after)}</td>` +
    `<td class="wrap">${escapeHtml(r.reason)}</td><td>${escapeHtml(r.source)}</td><td class="wrap">${escapeHtml(r.of || r.module)}</td></tr>`);
  document.getElementById("reshards").innerHTML = `<h2>Reshards</h2><p class="quiet">${number(run.reshards.length)} changes of placement, by the bytes that a rank sends for them in the forward. A copy that becomes replicate sends nothing there; its gradient is reduced in the backward.</p>` +
    `<table id="reshard-table"><thead><tr><th class="n">sent</th><th>node</th><th>from</th><th></th><th>to</th><th>reason</th><th>source</th><th>parameter or module</th></tr></thead><tbody>${rows.join("")}</tbody></table>`;
}

function startKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
    const tab = Object.keys(TABS)[Number(event.key) - 1];
    if (event.key === "/") {
      if (document.getElementById("graph").hidden) go("graph");
      setTimeout(() => document.getElementById("search").focus());
    } else if (event.key === "t") switchTheme();
    else if (tab) go(tab);
    else return;
    event.preventDefault();
  });
}

function switchTheme() {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  if (!document.getElementById("memory").hidden) drawMemory();
  if (!document.getElementById("experts").hidden) drawLoads();
  const canvas = document.querySelector("#timeline canvas");
  if (canvas) paintTimeline(canvas);
}

async function start() {
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  run = JSON.parse(await unpack("data"));
  document.getElementById("title").textContent = run.name;
  const stages = run.pipeline ? [["pp", run.pipeline.slots.length]] : [];
  document.getElementById("mesh").textContent = [...stages, ...Object.entries(run.mesh)].map(([axis, n]) => `${axis} ${n}${run.zigzag.includes(axis) ? " (head and tail)" : axis in run.blocks ? ` (${run.blocks[axis]} blocks)` : ""}`).join(" × ") || "one device";
  document.getElementById("theme").onclick = switchTheme;
  for (const begin of [startRun, startGraph, startDiff, startMemory, startCommunication, startPipeline, startExperts, startSharding, startKeys]) begin();
  addEventListener("hashchange", route);
  await route();
  document.body.dataset.ready = performance.now();
}
start();
