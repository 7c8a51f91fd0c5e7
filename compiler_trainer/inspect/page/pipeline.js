// Pipeline stages: the tasks of each rank over time, and the layers, memory and messages of the ranks.

const SLOT_ROW = 30, SLOT_LEFT = 70; // pixels: a rank's row, the names at the left
const SLOTS = { A: ["parameters gathered", "#a58bd0"], F: ["forward", "#5b8fd9"], B: ["backward", "#5fa777"], I: ["backward of inputs", "#5fb3a1"], W: ["backward of weights", "#e0a04a"], G: ["gradients reduced", "#d0899b"], U: ["update", "#9aa5b1"] };

function startPipeline() {
  if (!run.pipeline) return void delete TABS.pipeline;
  new ResizeObserver(() => document.getElementById("pipeline").hidden || drawSlots()).observe(document.getElementById("pipeline"));
}

const partsOfSlot = (name) => /^([A-Z])(\d+)(?:\.(\d+))?$/.exec(name).slice(1);
const slotKind = (kind) => (Object.hasOwn(SLOTS, kind) ? kind : "U");
const inUnit = (n) => (run.pipeline.unit === "ms" ? ms(n) : `${short(n)} forwards`);

function showPipeline() {
  const { schedule, idle, unit, slots } = run.pipeline, used = new Set(slots.flat().map(([name]) => slotKind(name[0])));
  const legend = Object.entries(SLOTS).filter(([kind]) => used.has(kind)).map(([, [what, colour]]) => `<span><b style="background:${colour}"></b>${what}</span>`);
  const times = unit === "ms" ? "Times are predicted." : "A backward is drawn as two forwards; a dry run (<code>run.dry=true cluster=h100</code>) predicts the time of each.";
  document.getElementById("pipeline").innerHTML = `<h2>${escapeHtml(schedule)} on ${number(slots.length)} pipeline ranks: idle ${(100 * idle).toFixed(1)} %</h2>` +
    `<p class="quiet">Each row is a rank, time goes to the right; numbers are microbatches; stages beyond a rank's first are paler. ${times} Click a task for its graph.</p>` +
    `<div class="legend">${legend.join("")}</div><div id="slots"></div>${run.stages_of_ranks ? ranksHtml(run.stages_of_ranks) : ""}`;
  drawSlots();
}

/** Draw the table as wide as the window. */
function drawSlots() {
  const { slots } = run.pipeline, place = document.getElementById("slots"), width = place?.clientWidth;
  if (!width) return;
  const end = Math.max(...slots.flat().map((slot) => slot[2])), x = (t) => SLOT_LEFT + ((width - SLOT_LEFT - 12) * t) / end, height = SLOT_ROW * slots.length;
  const graphs = Object.fromEntries(run.programs.map((p) => [p.program, p.number]));
  const rows = slots.map((row, rank) => {
    const firsts = [...new Set(row.map(([name]) => partsOfSlot(name)[2]).filter((stage) => stage !== undefined))].map(Number).sort((a, b) => a - b);
    return `<text x="0" y="${SLOT_ROW * rank + 19}">rank ${rank}</text><rect class="empty" x="${SLOT_LEFT}" y="${SLOT_ROW * rank + 2}" width="${width - SLOT_LEFT - 12}" height="${SLOT_ROW - 4}"/>` +
      row.map((slot) => slotSvg(slot, rank, x, firsts, graphs)).join("");
  });
  const feet = ticks(0, end).filter((t) => t <= end).map((t) => `<text x="${x(t)}" y="${height + 16}" text-anchor="${x(t) > width - 40 ? "end" : "middle"}">${inUnit(t)}</text>`);
  place.innerHTML = `<svg width="${width}" height="${height + 24}" role="img" aria-label="tasks of pipeline ranks by time">${rows.join("")}${feet.join("")}</svg>`;
}

function slotSvg([name, start, end], rank, x, firsts, graphs) {
  const [kind, at, stage] = partsOfSlot(name), program = stage === undefined ? name : kind + stage, wide = x(end) - x(start);
  const paler = stage === undefined ? 1 : 1 - (0.5 * firsts.indexOf(Number(stage))) / firsts.length;
  const said = `${escapeHtml(name)}: ${SLOTS[slotKind(kind)][0]}${stage === undefined ? "" : ` of microbatch ${at} in stage ${stage}`}, ${inUnit(end - start)} from ${inUnit(start)} on`;
  const box = `<rect x="${x(start)}" y="${SLOT_ROW * rank + 2}" width="${Math.max(0.5, wide - 0.8)}" height="${SLOT_ROW - 4}" fill="${SLOTS[slotKind(kind)][1]}" fill-opacity="${paler}"><title>${said}</title></rect>`;
  const label = stage !== undefined && wide > 7 * at.length + 3 ? `<text class="slot" x="${(x(start) + x(end)) / 2}" y="${SLOT_ROW * rank + 19}" text-anchor="middle">${at}</text>` : "";
  return program in graphs ? `<a href="#graph/${graphs[program]}">${box}${label}</a>` : box + label;
}

function ranksHtml(p) {
  const rows = p.busy_ms.map((busy, rank) => {
    const stages = p.ranks_of_stages.flatMap((of, stage) => (of === rank ? [stage] : [])), { device_bytes, kinds, fits } = p.memory[rank];
    const bar = Object.entries(kinds).map(([kind, n]) => `<span title="${escapeHtml(kind)} ${bytes(n)}" style="flex:${n};background:${colour(kind)}"></span>`).join("");
    const sent = p.sent_a_microbatch.filter((s) => s.source === rank).map((s) => `${bytes(s.bytes)} to ${s.to}`);
    return `<tr><td>${rank}</td><td class="wrap">${stages.map((s) => escapeHtml(spanOf(p.layers[s]))).join("; ")}</td><td class="n">${ms(busy)}</td><td class="n">${p.forwards_kept[rank]}</td>` +
      `<td class="n">${bytes(device_bytes)}${fits ? "" : " (does not fit)"}</td><td style="width:160px"><span class="stack">${bar}</span></td><td class="wrap">${sent.join(", ")}</td></tr>`;
  });
  return `<h2>Ranks</h2><table id="ranks"><thead><tr><th>rank</th><th>layers</th><th class="n">busy in a step</th><th class="n">forwards kept</th><th class="n">memory</th><th>of it</th><th>sent a microbatch</th></tr></thead><tbody>${rows.join("")}</tbody></table>`;
}

const spanOf = (layers) => (layers.length > 1 ? `${layers[0]} to ${layers[layers.length - 1]} (${layers.length})` : (layers[0] ?? "none"));
