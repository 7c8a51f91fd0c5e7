// The slice of a parameter that each rank holds, computed from its placement.

const sharding = { list: null, shown: [], chosen: null };
const LARGEST_GRID = 64, SHOWN_OF_AXIS = 4;

function startSharding() {
  const place = document.getElementById("parameters"), search = document.getElementById("parameter-search");
  sharding.list = new List(place, (i) => {
    const p = sharding.shown[i];
    return `<div class="row${p === sharding.chosen ? " on" : ""}" data-name="${escapeHtml(p.label)}">&nbsp; ${escapeHtml(p.label)}  <span class="spec">${escapeHtml(p.spec.replace(/ replicate.*/, ""))}</span></div>`;
  });
  const filter = () => {
    sharding.shown = run.parameters.filter((p) => p.label.toLowerCase().includes(search.value.toLowerCase()));
    sharding.list.show(sharding.shown.length);
  };
  search.addEventListener("input", filter);
  place.addEventListener("click", (event) => {
    const row = event.target.closest("[data-name]");
    if (row) go(`sharding/${row.dataset.name}`);
  });
  sharding.shown = run.parameters;
  sharding.filter = filter;
}

function showSharding(label) {
  sharding.chosen = run.parameters.find((p) => p.label === label) ?? run.parameters[0];
  sharding.list.show(sharding.shown.length, Math.max(0, sharding.shown.indexOf(sharding.chosen)));
  if (sharding.chosen) document.getElementById("slices").innerHTML = slicesHtml(sharding.chosen);
}

/** Return `[4@tp*64, 256] replicate(cp)` as dims of factors. */
function placement(spec) {
  const inside = /^\[([^\]]*)\]/.exec(spec)?.[1] ?? "";
  return inside.split(", ").filter(Boolean).map((dim) => dim.split("*").map((factor) => {
    const [size, ...axes] = factor.split("@");
    return { size: Number(size), axes };
  }));
}

const over = (axis) => run.flattened[axis] ?? [axis];
const ranks = (axis) => over(axis).reduce((n, a) => n * run.mesh[a], 1);
const place = (axis, at) => over(axis).reduce((k, a) => k * run.mesh[a] + at[a], 0);
const chunks = (axis) => run.zigzag.includes(axis) ? 2 : run.blocks[axis] ?? 1;
const pieces = (axis) => ranks(axis) * chunks(axis);
const share = (size, axis) => Math.ceil(size / pieces(axis)) * chunks(axis);
/** Return the numbers of a rank's chunks; for blocks, which are assigned per batch, those of evenly rising work. */
const held = (axis, k) => Array.from({ length: chunks(axis) }, (_, i) => i * ranks(axis) + (i % 2 ? ranks(axis) - 1 - k : k));
const local = (factor) => factor.axes.reduce(share, factor.size);

/** Return [first index in the full factor, first local index, length] of the runs that a rank holds. */
function runsOf(factor, at) {
  let runs = [[0, 0, factor.size]], size = factor.size;
  for (const axis of factor.axes) {
    const chunk = Math.ceil(size / pieces(axis)), cut = [];
    held(axis, place(axis, at)).forEach((k, slot) => {
      for (const [start, from, length] of runs) {
        const first = Math.max(from, k * chunk), last = Math.min(from + length, (k + 1) * chunk);
        if (first < last) cut.push([start + first - from, slot * chunk + first - k * chunk, last - first]);
      }
    });
    runs = cut;
    size = share(size, axis);
  }
  return runs;
}

/** Return [start, length] of a dim's runs of entries that a rank holds. */
function segments(factors, at) {
  if (!factors.length) return [[0, 1]];
  const [head, ...tail] = factors, inner = tail.reduce((n, f) => n * f.size, 1), own = runsOf(head, at);
  if (!tail.some((f) => f.axes.length)) return own.map(([start, , length]) => [start * inner, length * inner]);
  const rest = segments(tail, at), found = [];
  for (const [start, , length] of own)
    for (let i = 0; i < length; i++) for (const [s, n] of rest) found.push([(start + i) * inner + s, n]);
  return found;
}

/** Return the runs in each dim that the rank at these coordinates holds; empty in a dim if it holds only padding. */
const slices = (spec, at) => placement(spec).map((dim) => segments(dim, at));

function slicesHtml(parameter) {
  const axes = Object.keys(run.mesh), dims = placement(parameter.spec);
  const shape = dims.map((dim) => dim.reduce((n, f) => n * f.size, 1));
  const total = Object.values(run.mesh).reduce((a, b) => a * b, 1);
  const drawn = Object.fromEntries(axes.map((a) => [a, total > LARGEST_GRID ? Math.min(SHOWN_OF_AXIS, run.mesh[a]) : run.mesh[a]]));
  const inner = axes[axes.length - 1], outer = axes.slice(0, -1), colours = new Map();
  const used = dims.flatMap((dim) => dim.flatMap((f) => f.axes.flatMap(over))), copies = axes.filter((a) => !used.includes(a));
  let rows = [{}];
  for (const axis of outer) rows = rows.flatMap((at) => [...Array(drawn[axis]).keys()].map((k) => ({ ...at, [axis]: k })));
  const head = inner ? `<tr><th></th>${[...Array(drawn[inner]).keys()].map((k) => `<th>${escapeHtml(inner)} ${k}</th>`).join("")}</tr>` : "";
  const body = rows.map((at) => {
    const columns = inner ? [...Array(drawn[inner]).keys()].map((k) => ({ ...at, [inner]: k })) : [at];
    return `<tr><th>${outer.map((a) => `${escapeHtml(a)} ${at[a]}`).join(" · ")}</th>${columns.map((c) => `<td>${sliceSvg(shape, slices(parameter.spec, c), colours, rankOf(c))}</td>`).join("")}</tr>`;
  });
  const cut = axes.filter((a) => drawn[a] < run.mesh[a]).map((a) => `the first ${drawn[a]} of ${number(run.mesh[a])} along ${escapeHtml(a)}`);
  return `<h2 class="mono">${escapeHtml(parameter.label)}</h2><p><span class="mono">${escapeHtml(parameter.value)}</span> a rank of <span class="mono">[${shape.join(", ")}]</span>, ` +
    `placed <span class="mono">${escapeHtml(parameter.spec)}</span>, ${bytes(parameter.bytes)} a rank. ` +
    `${copies.length ? `Copied along ${copies.map(escapeHtml).join(" and ")}: same colour, same slice.` : "No entry is held twice."} ${cut.length ? `Drawn: ${cut.join(", ")}.` : ""}</p>` +
    `<table class="grid">${head}${body.join("")}</table>`;
}

const rankOf = (at) => Object.keys(run.mesh).reduce((rank, axis) => rank * run.mesh[axis] + at[axis], 0);

/** Return a tensor's first two dims as a rectangle, with a rank's entries filled. */
function sliceSvg(shape, held, colours, rank) {
  const key = JSON.stringify(held), [rows = 1, columns = 1] = shape;
  if (!colours.has(key)) colours.set(key, `hsl(${(210 + 137.5 * colours.size) % 360} 45% 55%)`);
  const side = (n, other) => Math.max(26, 96 * Math.min(1, Math.sqrt(n / Math.max(n, other))));
  const height = side(rows, columns), width = shape.length < 2 ? 26 : side(columns, rows);
  const empty = held.some((runs) => !runs.length), label = held.map((runs) => (runs.length ? runs.slice(0, 2).map(([s, n]) => `${s}–${s + n - 1}`).join(", ") + (runs.length > 2 ? ", …" : "") : "padding")).join(" × ");
  const boxes = empty ? [] : (held[0] ?? [[0, 1]]).slice(0, 200).flatMap(([y, h]) => (held[1] ?? [[0, 1]]).slice(0, 200).map(([x, w]) =>
    `<rect x="${(x / columns) * width}" y="${(y / rows) * height}" width="${(w / columns) * width}" height="${(h / rows) * height}" fill="${colours.get(key)}"/>`));
  return `<svg width="${width + 2}" height="${height + 2}" viewBox="-1 -1 ${width + 2} ${height + 2}"><title>rank ${rank}: ${label}</title>${boxes.join("")}` +
    `<rect width="${width}" height="${height}" fill="none" stroke="currentColor" stroke-opacity=".35"/></svg><span class="quiet">rank ${rank}<br>${empty ? "padding only" : label}</span>`;
}
