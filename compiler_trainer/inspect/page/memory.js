// Memory over the lines of a program, by kind, and the values alive at one line.

const memory = { of: null, line: 0, total: [] };
const SHOWN = 100, MARGIN = 84; // rows of a table, pixels left of the drawing

function startMemory() {
  fillPrograms("memory-stage", (n) => go(`memory/${n}`));
  const canvas = document.getElementById("memory-canvas");
  const lineOf = (event) => Math.round(memory.first + ((event.offsetX - MARGIN) / (canvas.clientWidth - MARGIN - 18)) * (memory.end - memory.first));
  canvas.addEventListener("click", (event) => go(`memory/${memory.of.number}/${Math.min(memory.end, Math.max(memory.first, lineOf(event)))}`));
  canvas.addEventListener("mousemove", (event) => {
    const line = lineOf(event), total = memory.total[line - memory.first];
    canvas.title = total === undefined ? "" : `line ${line}: ${bytes(total)}`;
  });
  new ResizeObserver(() => memory.of && drawMemory()).observe(canvas);
}

async function showMemory(n, line) {
  memory.of = run.programs.find((p) => p.number === n) ?? main();
  document.getElementById("memory-stage").value = memory.of.number;
  [memory.first, memory.end] = memory.of.span;
  memory.line = line ?? memory.of.peak.line;
  await openStage(memory.of.number);
  drawMemory();
  await tellAlive();
}

/** Return the bytes alive at every line, by kind. */
function livingBytes({ memory: m, kinds }, first, end) {
  const byKind = kinds.map(() => new Float64Array(end - first + 2));
  m.bytes.forEach((size, i) => {
    byKind[m.kind[i]][m.born[i] - first] += size;
    byKind[m.kind[i]][m.last[i] - first + 1] -= size;
  });
  for (const series of byKind) for (let i = 1; i < series.length; i++) series[i] += series[i - 1];
  return byKind;
}

function drawMemory() {
  const { first, end, of } = memory, length = end - first + 1, series = livingBytes(of, first, end);
  memory.total = Float64Array.from({ length }, (_, i) => series.reduce((sum, s) => sum + s[i], 0));
  const { context, width, height } = sharp(document.getElementById("memory-canvas"));
  const left = MARGIN, right = width - 18, floor = height - 24, top = of.peak.bytes * 1.06 || 1;
  const x = (line) => left + ((line - first) / (length - 1 || 1)) * (right - left), y = (n) => floor - (n / top) * (floor - 10);
  context.font = "12px system-ui";
  context.textAlign = "right";
  for (const n of byteTicks(top)) {
    context.fillStyle = style("--line");
    context.fillRect(left, y(n), right - left, 1);
    context.fillStyle = style("--quiet");
    context.fillText(bytes(n).replace(/\.0+ /, " "), left - 8, y(n) + 4);
  }
  context.textAlign = "left";
  for (let px = left; px < right; px++) { // the highest line under each pixel
    const from = Math.floor(((px - left) / (right - left)) * (length - 1)), to = Math.max(from + 1, Math.ceil(((px + 1 - left) / (right - left)) * (length - 1)));
    let at = from;
    for (let i = from; i < to; i++) if (memory.total[i] > memory.total[at]) at = i;
    let sum = 0;
    series.forEach((s, k) => {
      context.fillStyle = colour(of.kinds[k]);
      context.fillRect(px, y(sum + s[at]), 1.2, y(sum) - y(sum + s[at]));
      sum += s[at];
    });
  }
  let free = 0; // the end of the previous name
  for (const [phase, line] of of.phases) {
    context.fillStyle = style("--quiet");
    context.fillRect(x(line), 10, 1, floor - 10);
    const wide = context.measureText(phase).width, at = Math.min(x(line) + 4, right - wide);
    if (at < free) continue;
    context.fillText(phase, at, height - 8);
    free = at + wide + 8;
  }
  context.fillStyle = style("--text");
  context.fillRect(x(memory.line) - 1, 4, 2, floor);
}

/** Return round numbers of bytes, up to the maximum. */
function byteTicks(most) {
  const unit = 1024 ** Math.floor(Math.log(Math.max(1, most)) / Math.log(1024));
  return ticks(0, most / unit).map((n) => n * unit).filter((n) => n <= most);
}

async function tellAlive() {
  const { of, line } = memory, m = of.memory, text = await openStage(of.number), sums = new Map();
  const alive = m.node.map((_, i) => i).filter((i) => m.born[i] <= line && line <= m.last[i]);
  alive.sort((a, b) => m.bytes[b] - m.bytes[a] || m.born[a] - m.born[b]);
  const total = alive.reduce((sum, i) => sum + m.bytes[i], 0);
  for (const i of alive) sums.set(of.kinds[m.kind[i]], (sums.get(of.kinds[m.kind[i]]) ?? 0) + m.bytes[i]);
  const here = line <= text.count ? parts(text.line(line)) : { name: "", source: "", module: "" };
  document.getElementById("memory-at").innerHTML = `<b>${bytes(total)}</b> alive at ${nodeLink(of.number, line, here.name || "the end")} ` +
    `<span class="quiet">${escapeHtml([here.source, here.module].join(" "))} ${line === of.peak.line ? "· the peak" : `· <a href="#memory/${of.number}">peak</a>`}</span>`;
  document.getElementById("memory-legend").innerHTML = legend(sums, bytes);
  const rows = alive.slice(0, SHOWN).map((i) => {
    const made = parts(text.line(text.definitions.get(m.node[i])));
    return `<tr><td class="n">${bytes(m.bytes[i])}</td><td><b class="dot" style="background:${colour(of.kinds[m.kind[i]])}"></b>${escapeHtml(of.kinds[m.kind[i]])}</td>` +
      `<td class="node">${nodeLink(of.number, text.definitions.get(m.node[i]), made.name)}</td><td class="mono">${m.times[i] > 1 ? `${m.times[i]} x ` : ""}${escapeHtml(made.value)}</td>` +
      `<td>${escapeHtml(made.source)}</td><td class="wrap">${escapeHtml(made.module)}</td><td class="n"><a href="${stageLink(of.number, m.last[i])}">${m.last[i]}</a></td></tr>`;
  });
  const rest = alive.slice(SHOWN).reduce((sum, i) => sum + m.bytes[i], 0);
  if (rest) rows.push(`<tr><td class="n">${bytes(rest)}</td><td class="quiet" colspan="6">${number(alive.length - SHOWN)} more</td></tr>`);
  document.getElementById("memory-alive").innerHTML = `<table id="alive"><thead><tr><th class="n">bytes</th><th>holds</th><th>node</th><th>value</th><th>source</th><th>module</th><th class="n">freed after line</th></tr></thead><tbody>${rows.join("")}</tbody></table>`;
}

/** Return the kinds with their colours, largest first. */
function legend(sums, format) {
  return [...sums].sort((a, b) => b[1] - a[1]).map(([kind, n]) => `<span><b style="background:${colour(kind)}"></b>${escapeHtml(kind)} <span class="quiet">${format(n)}</span></span>`).join("");
}

/** Return a canvas with the resolution of the screen. */
function sharp(canvas) {
  const width = canvas.clientWidth, height = canvas.clientHeight, ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return { context, width, height };
}
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
