// The run: its loss and other metrics, its machine, its time of compilation, and the options that were set.

function showRun() {
  const { curves, names, facts, seconds, changed } = run.course;
  const beside = Object.entries(curves).filter(([name]) => name !== "loss" && name !== "eval_loss");
  const charts = beside.map(([name, points]) => chart(names[name][0], points.map(([step]) => step), points.map(([, value]) => value), (v) => withUnit(v, names[name][1])));
  document.getElementById("run").innerHTML =
    (curves.loss ? `<div class="plot" id="loss"></div>` : `<p class="quiet">This run has trained nothing: a dry run, or one that ended before its first step.</p>`) +
    `<div class="cards">${charts.join("")}</div>` +
    `<h2>What ran</h2>${pairs("facts", facts.map(([what, value]) => [escapeHtml(what), escapeHtml(value)]))}${compiled(seconds)}` +
    `<h2>Options that were set</h2>${pairs("changed", changed.map(([name, value]) => [`<span class="mono">${escapeHtml(name)}</span>`, `<span class="mono">${escapeHtml(JSON.stringify(value))}</span>`]))}`;
  drawLoss();
}

function startRun() {
  new ResizeObserver(drawLoss).observe(document.getElementById("run"));
}

/** Draw the loss as wide as the window, so that its labels keep their size. */
function drawLoss() {
  const place = document.getElementById("loss"), { loss, eval_loss } = run.course.curves;
  if (loss && place?.clientWidth) place.innerHTML = lossPlot(loss, eval_loss ?? [], place.clientWidth - 34);
}

function withUnit(v, unit) {
  if (unit === "bytes") return bytes(v);
  if (unit === "ms") return ms(v);
  if (unit === "TFLOP/s") return `${flops(1e12 * v) || 0}FLOP/s`;
  return unit === "%" ? `${short(100 * v)} %` : `${short(v)} ${unit}`.trim();
}

const pairs = (id, rows) => `<table id="${id}">${rows.map(([a, b]) => `<tr><td class="name">${a}</td><td class="wrap">${b}</td></tr>`).join("")}</table>`;

function compiled(seconds) {
  if (!seconds.length) return "";
  const most = Math.max(...seconds.map(([, s]) => s)), all = seconds.reduce((sum, [, s]) => sum + s, 0);
  const rows = seconds.map(([what, s]) => `<tr><td class="name">${escapeHtml(what)}</td><td class="n" style="width:70px">${s.toFixed(2)} s</td><td><span class="meter" style="width:${(300 * s) / most}px"></span></td></tr>`);
  return `<h2>Compiled in ${all.toFixed(1)} s</h2><table id="compiled">${rows.join("")}</table>`;
}

/** Return the loss over steps with both axes, the validation loss as points on a line. */
function lossPlot(loss, held, width) {
  const height = 300, left = 46, right = 12, top = 14, bottom = 34;
  const all = [...loss, ...held], values = all.map(([, v]) => v), last = Math.max(...all.map(([s]) => s)), first = Math.min(...all.map(([s]) => s));
  const rows = ticks(Math.min(...values), Math.max(...values)), columns = ticks(first, last).filter((s) => Number.isInteger(s) && s >= first && s <= last);
  const low = rows[0], high = rows[rows.length - 1];
  const x = (step) => left + ((width - left - right) * (step - first)) / Math.max(1, last - first), y = (v) => height - bottom - ((height - top - bottom) * (v - low)) / (high - low);
  const line = (points, name) => `<polyline class="${name}" points="${points.map(([s, v]) => `${x(s).toFixed(1)},${y(v).toFixed(1)}`).join(" ")}"/>`;
  const grid = rows.map((v) => `<line class="grid-line" x1="${left}" x2="${width - right}" y1="${y(v)}" y2="${y(v)}"/><text x="${left - 8}" y="${y(v) + 4}" text-anchor="end">${short(v)}</text>`).join("");
  const foot = columns.map((s) => `<text x="${x(s)}" y="${height - 14}" text-anchor="middle">${number(s)}</text>`).join("");
  const points = held.map(([s, v]) => `<circle cx="${x(s)}" cy="${y(v)}" r="3.5"><title>validation, step ${number(s)}: ${short(v)}</title></circle>`).join("");
  const alone = held.length === 1 ? `<line class="held-out alone" x1="${left}" x2="${width - right}" y1="${y(held[0][1])}" y2="${y(held[0][1])}"/>` : "";
  const end = `<b>${short(loss[loss.length - 1][1])}</b>${held.length ? `, validation <b>${short(held[held.length - 1][1])}</b>` : ""}`;
  return `<div><i class="dot" style="background:var(--bar)"></i>loss${held.length ? ` &nbsp; <i class="dot" style="background:#d9655b"></i>validation` : ""} <span class="quiet">in nats per token, by step; at the end ${end}</span></div>` +
    `<svg width="${width}" height="${height}" role="img" aria-label="loss by step">${grid}${foot}${alone}${line(loss, "loss")}${line(held, "held-out")}${points}</svg>`;
}

const short = (v) => Number(v.toPrecision(4)).toLocaleString("en-US", { maximumSignificantDigits: 4 });

/** Return four to eight round numbers that cover an interval. */
function ticks(low, high) {
  const rough = (high - low || Math.abs(high) || 1) / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough), found = [];
  for (let i = Math.floor(low / step); ; i++) {
    found.push(Number((i * step).toPrecision(12)));
    if (i * step >= high) return found;
  }
}

/** Return a line over steps, with its smallest, largest and last value. */
function chart(name, steps, values, of = short) {
  const low = Math.min(...values), high = Math.max(...values);
  const x = (i) => (300 * i) / Math.max(1, values.length - 1), y = (n) => 72 - (64 * (n - low)) / (high - low || 1);
  const line = values.map((n, i) => `${x(i).toFixed(1)},${y(n).toFixed(1)}`).join(" ");
  return `<figure class="card"><h3>${escapeHtml(name)}</h3><div class="big">${of(values[values.length - 1])}</div>` +
    `<svg viewBox="0 0 300 80" preserveAspectRatio="none" role="img" aria-label="${escapeHtml(name)} by step"><polyline points="${line}"/></svg>` +
    `<p class="quiet">from ${of(low)} to ${of(high)}, steps ${number(steps[0])} to ${number(steps[steps.length - 1])}</p></figure>`;
}
