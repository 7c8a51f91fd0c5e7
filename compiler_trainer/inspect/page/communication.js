// The communication of ranks: by axis and kind, by collective, and along the predicted timeline.

const STREAM = 110; // pixels left of the timeline
const timeline = { events: [], waits: [], from: 0, to: 1, streams: [] };
const RING = "shift"; // to the next rank of a ring

function startCommunication() {
  fillPrograms("communication-stage", (n) => go(`communication/${n}`));
}

async function showCommunication(n) {
  const of = run.programs.find((p) => p.number === n) ?? main();
  document.getElementById("communication-stage").value = of.number;
  const total = of.traffic.reduce((sum, t) => sum + t.sent_bytes, 0), most = Math.max(1, ...of.traffic.map((t) => t.sent_bytes));
  const exposed = of.collectives.reduce((sum, c) => sum + (c.exposed_ms ?? 0), 0);
  document.getElementById("communication-note").textContent = `${bytes(total)} sent by each rank in ${number(of.collectives.length)} collectives` +
    (of.timeline.length ? `, ${ms(exposed)} exposed: ${Math.round((100 * exposed) / ends(of))} % of ${ms(ends(of))}` : "");
  drawTimeline(of);
  const axes = [...of.traffic].sort((a, b) => b.sent_bytes - a.sent_bytes).map((t) => `<tr><td>${escapeHtml(t.axis)}</td><td>${escapeHtml(t.kind)}${t.kind === RING ? ' <span class="quiet">to the next rank of a ring</span>' : ""}</td><td class="n">${number(t.calls)}</td><td class="n">${bytes(t.sent_bytes)}</td>` +
    `<td style="width:100%"><span class="meter" style="width:${(100 * t.sent_bytes) / most}%;background:${laneColour(t.axis)}"></span></td></tr>`);
  const text = await openStage(of.number);
  document.getElementById("communication-body").innerHTML =
    `<h2>By axis</h2><table id="by-axis"><thead><tr><th>axis</th><th>kind</th><th class="n">calls</th><th class="n">bytes sent</th><th></th></tr></thead><tbody>${axes.join("")}</tbody></table>` +
    `<h2>Collectives</h2><p class="quiet">${of.timeline.length ? "Longest exposed first." : "Those with nothing to hide behind first: what lies between a collective and the wait for it could hide it."}</p>` +
    `<table id="collectives"><thead><tr><th>node</th><th>kind</th><th>axis</th><th class="n">bytes sent</th>${of.timeline.length ? '<th class="n">exposed</th>' : ""}` +
    `<th class="n">operators until the wait</th><th class="n">FLOPs until the wait</th><th>source</th><th>module</th><th>phase</th></tr></thead><tbody>${of.collectives.slice(0, 400).map((c) => sentRow(of, text, c)).join("")}</tbody></table>`;
}

/** Return the end of a program's timeline in ms. */
const ends = (of) => of.timeline.reduce((end, e) => Math.max(end, e[3]), 0);

/** Return the colour of a stream in the timeline, and of its bytes. */
function laneColour(stream) {
  const lane = timeline.streams.indexOf(stream);
  return lane > 0 ? AXES[(lane - 1) % AXES.length] : lane ? "var(--bar)" : "#5b8fd9";
}

/** Return the spans in which nothing is computed while a collective runs. */
function waitsOf(events) {
  const spans = (kept) => events.filter(kept).map((e) => [e[2], e[3]]).sort((a, b) => a[0] - b[0]);
  const gaps = [], sending = spans((e) => e[1] !== "compute");
  let free = 0;
  for (const [start, end] of spans((e) => e[1] === "compute")) {
    if (start > free) gaps.push([free, start]);
    free = Math.max(free, end);
  }
  return gaps.filter(([start, end]) => sending.some(([a, b]) => a < end && start < b));
}

function sentRow(of, text, c) {
  const node = parts(text.line(c.line));
  return `<tr><td class="node">${nodeLink(of.number, c.line, c.node)}</td><td>${escapeHtml(c.kind)}</td><td>${escapeHtml(c.axis)}</td><td class="n">${bytes(c.sent_bytes)}</td>` +
    (of.timeline.length ? `<td class="n">${c.exposed_ms ? ms(c.exposed_ms) : ""}</td>` : "") +
    `<td class="n">${number(c.between)}</td><td class="n">${flops(c.between_flops)}</td><td>${escapeHtml(node.source)}</td><td>${escapeHtml(node.module)}</td><td>${escapeHtml(node.phase)}</td></tr>`;
}

function drawTimeline(of) {
  const place = document.getElementById("timeline");
  if (!of.timeline.length) {
    place.innerHTML = '<p class="quiet hint">This run holds no predicted times. Compile the same options with <code>run.dry=true cluster=h100</code> and inspect that folder to see each collective next to the computation that hides it.</p>';
    return;
  }
  timeline.events = of.timeline;
  timeline.waits = waitsOf(of.timeline);
  timeline.streams = ["compute", ...new Set(of.timeline.map((e) => e[1]).filter((s) => s !== "compute"))];
  timeline.whole = ends(of);
  [timeline.from, timeline.to] = [0, timeline.whole];
  place.innerHTML = `<p class="quiet hint">Predicted: ${ms(timeline.whole)}. Shaded: the computation waits for a collective. Turn the wheel to zoom, drag to move, click to see the node.</p><canvas style="height:${26 * timeline.streams.length + 30}px"></canvas>`;
  const canvas = place.querySelector("canvas");
  const at = (event) => timeline.from + ((event.offsetX - STREAM) / (canvas.clientWidth - STREAM - 10)) * (timeline.to - timeline.from);
  const under = (event) => timeline.events.find((e) => e[1] === timeline.streams[Math.floor((event.offsetY - 6) / 26)] && e[2] <= at(event) && at(event) <= e[3]);
  canvas.onwheel = (event) => {
    event.preventDefault();
    const centre = at(event), scale = event.deltaY > 0 ? 1.25 : 0.8;
    moveTimeline(centre + (timeline.from - centre) * scale, centre + (timeline.to - centre) * scale, canvas);
  };
  canvas.onmousemove = (event) => {
    const shift = (-event.movementX / (canvas.clientWidth - STREAM - 10)) * (timeline.to - timeline.from), e = under(event);
    if (event.buttons) moveTimeline(timeline.from + shift, timeline.to + shift, canvas), (timeline.dragged = true);
    canvas.title = e ? `%${e[0]}: ${ms(e[3] - e[2])}` : "";
  };
  canvas.onmousedown = () => (timeline.dragged = false);
  canvas.onclick = async (event) => {
    const e = under(event), text = e && (await openStage(of.number));
    if (e && !timeline.dragged) go(`graph/${of.number}/${text.definitions.get(e[0])}`);
  };
  paintTimeline(canvas);
}

function moveTimeline(from, to, canvas) {
  const width = Math.min(timeline.whole, to - from);
  timeline.from = Math.min(Math.max(0, from), timeline.whole - width);
  timeline.to = timeline.from + width;
  paintTimeline(canvas);
}

function paintTimeline(canvas) {
  const { context, width } = sharp(canvas), left = STREAM, right = width - 10;
  const x = (t) => left + ((t - timeline.from) / (timeline.to - timeline.from)) * (right - left);
  context.font = "12px system-ui";
  timeline.streams.forEach((stream, row) => {
    context.fillStyle = style("--raised");
    context.fillRect(left, 6 + 26 * row, right - left, 22);
    context.fillStyle = style("--quiet");
    context.fillText(stream, 18, 21 + 26 * row);
  });
  context.fillStyle = style("--wait");
  for (const [start, end] of timeline.waits) {
    if (end < timeline.from || start > timeline.to) continue;
    const a = Math.max(left, x(start));
    context.fillRect(a, 6, Math.min(right, x(end)) - a, 26 * timeline.streams.length - 4);
  }
  for (const [, stream, start, end] of timeline.events) {
    if (end < timeline.from || start > timeline.to) continue;
    const row = timeline.streams.indexOf(stream), a = Math.max(left, x(start)), b = Math.min(right, x(end));
    context.fillStyle = laneColour(stream);
    context.fillRect(a, 6 + 26 * row, Math.max(0.7, b - a - (b - a > 3 ? 0.6 : 0)), 22);
  }
  context.fillStyle = style("--quiet");
  for (const t of ticks(timeline.from, timeline.to)) {
    const said = `${t.toLocaleString("en-US", { maximumFractionDigits: 9 })} ms`, wide = context.measureText(said).width;
    if (timeline.from <= t && x(t) + wide <= width) context.fillText(said, x(t), 26 * timeline.streams.length + 22);
  }
}
