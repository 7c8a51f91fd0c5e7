// Two stages compared. Nodes have names, so the longest common part is a longest increasing run of positions.

const diff = { rows: [], list: null };
const AROUND = 3; // unchanged lines shown around a change

function startDiff() {
  for (const id of ["diff-a", "diff-b"]) fillStages(id, () => go(`diff/${document.getElementById("diff-a").value}/${document.getElementById("diff-b").value}`));
  diff.list = new List(document.getElementById("diff-lines"), (i) => {
    const [kind, sign, n, text] = diff.rows[i];
    return `<div class="row ${kind}"><i>${n || ""}</i>${sign} ${kind === "head" ? escapeHtml(text) : lineHtml(text)}</div>`;
  });
}

async function showDiff(a, b) {
  b = b ?? main().number;
  a = a ?? Math.max(0, b - 1);
  document.getElementById("diff-a").value = a;
  document.getElementById("diff-b").value = b;
  const [before, after] = await Promise.all([openStage(a), openStage(b)]);
  const { rows, counts } = compare(before, after);
  diff.rows = rows;
  document.getElementById("diff-counts").textContent = Object.entries(counts).map(([k, n]) => `${number(n)} ${k}`).join(", ");
  diff.list.show(rows.length);
}

/** Return the entries of a stage by key: the name of a node, or the text of a heading. */
function entries(text) {
  const found = [], seen = new Map();
  for (let n = 1; n <= text.count; n++) {
    const line = text.line(n), own = line[0] === "%" ? line.slice(0, line.indexOf(" ")) : line.split(" = ")[0];
    const times = seen.get(own) ?? 0; // graphs that operators call may reuse a name
    seen.set(own, times + 1);
    found.push({ key: times ? `${own} ${times}` : own, line, n });
  }
  return found;
}

function compare(before, after) {
  const a = entries(before), b = entries(after);
  const where = new Map(b.map((entry, j) => [entry.key, j]));
  const pairs = a.map((entry, i) => [i, where.get(entry.key)]).filter((pair) => pair[1] !== undefined);
  const kept = rising(pairs.map((pair) => pair[1])).map((k) => pairs[k]);
  const counts = { removed: 0, added: 0, changed: 0, moved: 0 }, old = new Set(a.map((entry) => entry.key)), all = [];
  let i = 0, j = 0;
  for (const [x, y] of [...kept, [a.length, b.length]]) {
    for (; i < x; i++) {
      const gone = !where.has(a[i].key);
      if (gone) counts.removed++;
      all.push(["removed", gone ? "−" : "↕", a[i].n, a[i].line]);
    }
    for (; j < y; j++) {
      const isNew = !old.has(b[j].key);
      counts[isNew ? "added" : "moved"]++;
      all.push(["added", isNew ? "+" : "↕", b[j].n, b[j].line]);
    }
    if (x === a.length) break;
    if (a[x].line === b[y].line) all.push(["", " ", b[y].n, b[y].line]);
    else counts.changed++, all.push(["before", "<", a[x].n, a[x].line], ["after", ">", b[y].n, b[y].line]);
    i = x + 1, j = y + 1;
  }
  return { rows: folded(all), counts };
}

/** Return the indices of a longest increasing subsequence. */
function rising(values) {
  const tails = [], previous = new Int32Array(values.length);
  values.forEach((value, i) => {
    let low = 0, high = tails.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[tails[middle]] < value) low = middle + 1;
      else high = middle;
    }
    previous[i] = low ? tails[low - 1] : -1;
    tails[low] = i;
  });
  const found = [];
  for (let i = tails.length ? tails[tails.length - 1] : -1; i >= 0; i = previous[i]) found.push(i);
  return found.reverse();
}

/** Return the changes with a few lines around them. */
function folded(rows) {
  const near = new Uint8Array(rows.length);
  rows.forEach((row, i) => row[0] && near.fill(1, Math.max(0, i - AROUND), i + AROUND + 1));
  const shown = [];
  for (let i = 0; i < rows.length; i++) {
    if (near[i]) { shown.push(rows[i]); continue; }
    const start = i;
    while (i + 1 < rows.length && !near[i + 1]) i++;
    shown.push(["head", " ", 0, `${number(i - start + 1)} unchanged lines`]);
  }
  return shown;
}
