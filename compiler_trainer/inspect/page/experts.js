// Experts: the load of each layer, step by step, and related metrics.

const ROW = 22, LABELS = 230; // pixels: a layer's row, the names at the left

function startExperts() {
  if (!run.experts) return void delete TABS.experts;
  const canvas = document.getElementById("experts-canvas"), { spans, loads } = run.experts, layers = Object.keys(loads);
  canvas.style.height = `${ROW * layers.length + 26}px`;
  canvas.addEventListener("mousemove", (event) => {
    const column = Math.floor(((event.offsetX - LABELS) / (canvas.clientWidth - LABELS - 18)) * spans.length), layer = layers[Math.floor(event.offsetY / ROW)];
    const load = loads[layer]?.[column];
    canvas.title = load === undefined ? "" : `${layer}, ${stepsOf(spans[column])}: ${load.toFixed(2)} times the mean`;
  });
  new ResizeObserver(() => document.getElementById("experts").hidden || drawLoads()).observe(canvas);
}

const stepsOf = ([first, last]) => (first === last ? `step ${number(first)}` : `steps ${number(first)} to ${number(last)}`);
const busiest = () => Math.max(1.01, ...Object.values(run.experts.loads).flat());
const heat = (load, most) => `hsl(${45 - 45 * (load - 1) / (most - 1)} 85% ${80 - 42 * (load - 1) / (most - 1)}%)`;

function showExperts() {
  const most = busiest(), stops = [0, 0.25, 0.5, 0.75, 1].map((t) => heat(1 + t * (most - 1), most));
  document.getElementById("experts-legend").innerHTML =
    `<span class="quiet">Load of the busiest expert over the mean of its layer; a column is ${run.experts.spans.some(([a, b]) => a !== b) ? "the highest in a few steps" : "a step"}:</span>` +
    `<span>1.00 <i class="ramp" style="background:linear-gradient(90deg,${stops.join(",")})"></i> ${most.toFixed(2)}</span>`;
  drawLoads();
  document.getElementById("experts-beside").innerHTML = Object.entries(run.experts.beside).map(([name, values]) => chart(name, run.experts.spans.map(([, last]) => last), values)).join("");
}

function drawLoads() {
  const { context, width } = sharp(document.getElementById("experts-canvas")), { spans, loads } = run.experts;
  const most = busiest(), step = (width - LABELS - 18) / spans.length;
  context.font = "12px system-ui";
  Object.entries(loads).forEach(([layer, values], row) => {
    context.fillStyle = style("--quiet");
    context.fillText(`${layer}  ${values[values.length - 1].toFixed(2)}`, 18, ROW * row + 15, LABELS - 26);
    values.forEach((load, column) => {
      context.fillStyle = heat(load, most);
      context.fillRect(LABELS + step * column, ROW * row + 1, Math.max(0.7, step), ROW - 2);
    });
  });
  context.fillStyle = style("--quiet");
  const foot = ROW * Object.keys(loads).length + 16, last = stepsOf(spans[spans.length - 1]);
  context.fillText(stepsOf(spans[0]), LABELS, foot);
  context.fillText(last, width - 18 - context.measureText(last).width, foot);
}
