// Overlays the curves of all points, with colours and filters by choice, and sorts the table.
const { labels, runs, charts } = data;
const shown_labels = labels.filter((l) => l.values.length <= (l.name === "point" ? 12 : 24)).slice(0, 7);
const FEW_CROSSES = 30;
const off = new Set(); // "label\nvalue" of each chip that is switched off
const rows = [...document.querySelectorAll("tr[data-run]")].sort((a, b) => a.dataset.run - b.dataset.run);
const x_axis = document.getElementById("x"), smooth = document.getElementById("smooth");
let colour = labels.find((l) => l.name === data.colour) ?? labels[0];
let plots = [], shown = [];

// Few values get colours that are far apart, many (or ordered) ones a walk around the colour wheel.
const paint = (i, n) => (i < 0 ? color("--soft") : n <= 8 ? color(`--c${i}`) : `hsl(${Math.round((320 * i) / n)} 62% ${dark.matches ? 66 : 42}%)`);
const of_run = (run) => paint(colour.values.indexOf(run.values[colour.name]), colour.values.length);
const clock = (s) => (s >= 7200 ? `${+(s / 3600).toFixed(1)} h` : s >= 60 ? `${Math.floor(s / 60)}:${String(Math.floor(s % 60)).padStart(2, "0")}` : `${+s.toPrecision(3)} s`);
const clock_steps = [0.1, 0.2, 0.5, ...[1, 2, 5, 10, 20, 30].flatMap((v) => [v, 60 * v]).sort((a, b) => a - b), ...[1, 2, 4, 8, 12, 24, 48, 120, 240].map((v) => 3600 * v)];
const x_text = (v) => (x_axis.value === "t" ? clock(v) : compact.format(v));

// The value of a curve nearest to a position on the common x-axis, where most curves have none.
function nearest(plot, series, at) {
  const [xs, ys] = [plot.data[0], plot.data[series]];
  for (let d = 0; d < xs.length; d++) {
    if (ys[at - d] != null) return at - d;
    if (ys[at + d] != null) return at + d;
  }
  return at;
}

const drawn_values = (curve) => (smooth.checked && curve.smooth) || curve.y;

function readout(plot, element, series) {
  const run = series > 0 ? shown[series - 1] : null;
  const at = plot.cursor.idxs?.[series];
  element.replaceChildren(run ? "" : "Point at a curve to see which one it is.");
  if (!run) return;
  element.append(Object.assign(document.createElement("b"), { textContent: `#${run.n} ${run.name}` }));
  if (at != null && plot.data[series][at] != null) element.append(` · ${x_text(plot.data[0][at])} · ${number(plot.data[series][at])}`);
}

// Where the values of a curve stop being finite, with the last one that was.
function breaks(curve) {
  const found = [], values = drawn_values(curve);
  let last = values.find((v) => v != null);
  curve.y.forEach((value, i) => {
    if (value == null && last != null && (i === 0 || curve.y[i - 1] != null)) found.push([i, last]);
    last = values[i] ?? last;
  });
  return found;
}

// A cross at each of them. Where there are many, as loss scaling makes in norms, only of the curve pointed at, and those
// that end a run.
function crosses(plot, chart, lit) {
  const curves = shown.map((run) => [run, run.curves[chart.key]]).filter(([, curve]) => curve);
  const all = curves.map(([run, curve]) => [run, curve, breaks(curve)]);
  const few = all.reduce((sum, [, , found]) => sum + found.length, 0) <= FEW_CROSSES;
  const { ctx } = plot, size = 4.5 * devicePixelRatio;
  for (const [run, curve, found] of all) {
    const pointed = lit > 0 && shown[lit - 1] === run;
    if (lit > 0 && !pointed) continue;
    for (const [i, last] of found) {
      if (!few && !pointed && curve.y.slice(i).some((v) => v != null)) continue;
      const x = plot.valToPos(curve[x_axis.value][i], "x", true), y = plot.valToPos(last, "y", true);
      ctx.beginPath();
      for (const s of [size, -size]) { ctx.moveTo(x - size, y - s); ctx.lineTo(x + size, y + s); }
      for (const [stroke, width] of [[color("--card"), 5.5], [of_run(run), 2.5]]) {
        ctx.strokeStyle = stroke;
        ctx.lineWidth = width * devicePixelRatio;
        ctx.stroke();
      }
    }
  }
}

function draw(chart) {
  const card = document.getElementById(chart.key), place = card.querySelector(".plot"), text = card.querySelector(".readout");
  const log = card.querySelector(".log").checked;
  const tables = shown.map((run) => {
    const curve = run.curves[chart.key] ?? { x: [], t: [], y: [] };
    return [curve[x_axis.value], drawn_values(curve).map((v) => (log && v <= 0 ? null : v))];
  });
  const few = shown.length <= 20 && Math.max(0, ...tables.map((t) => t[0].length)) <= 40;
  let lit = 0;
  const say = (plot) => readout(plot, text, lit);
  return new uPlot({
    width: place.clientWidth, height: chart === charts[0] ? 380 : 280, legend: { show: false },
    cursor: { sync: { key: "page", setSeries: true }, focus: { prox: 24 }, dataIdx: nearest, points: { show: (_, i) => (i === lit ? undefined : false) } },
    focus: { alpha: shown.length > 1 ? 0.12 : 1 },
    scales: { x: { time: false }, y: y_scale(log) },
    axes: axes(log, x_text, x_axis.value === "t" ? clock_steps : undefined), padding: [8, 16, 0, 0],
    series: [{}, ...shown.map((run) => ({ label: run.name, stroke: of_run(run), width: shown.length > 20 ? 1.2 : 1.7, alpha: shown.length > 20 ? 0.8 : 1, points: { show: few, size: 5, fill: color("--card") } }))],
    hooks: {
      ready: [say], setCursor: [say], draw: [(plot) => crosses(plot, chart, lit)],
      setSeries: [(plot, i) => {
        lit = i ?? 0;
        say(plot);
        rows.forEach((row) => row.classList.toggle("lit", lit > 0 && runs[row.dataset.run] === shown[lit - 1]));
      }],
    },
  }, tables.length ? uPlot.join(tables) : [[]], place);
}

function redraw() {
  shown = runs.filter((run) => !labels.some((l) => off.has(`${l.name}\n${run.values[l.name]}`)));
  rows.forEach((row) => {
    row.hidden = !shown.includes(runs[row.dataset.run]);
    row.style.setProperty("--c", of_run(runs[row.dataset.run]));
  });
  document.querySelectorAll(".chips button").forEach((chip) => {
    const { label, value } = chip.dataset;
    chip.ariaPressed = String(!off.has(`${label}\n${value}`));
    chip.firstChild.hidden = label !== colour.name;
    chip.style.setProperty("--c", paint(colour.values.indexOf(value), colour.values.length));
  });
  plots.forEach((plot) => plot.destroy());
  plots = charts.map(draw);
  redraw_outcomes();
}

for (const label of shown_labels) {
  const name = document.createElement("label"), chips = document.createElement("div");
  const pick = Object.assign(document.createElement("input"), { type: "radio", name: "colour", checked: label === colour });
  pick.title = "Give the curves their colours by this";
  pick.onchange = () => { colour = label; redraw(); };
  name.append(pick, ` ${label.name}`);
  chips.className = "chips";
  for (const value of label.values) {
    const chip = document.createElement("button");
    chip.append(Object.assign(document.createElement("i"), { className: "dot" }), value);
    Object.assign(chip.dataset, { label: label.name, value });
    chip.title = "Click to hide or show, double-click to show only this";
    const key = `${label.name}\n${value}`;
    chip.onclick = () => { off.has(key) ? off.delete(key) : off.add(key); redraw(); };
    chip.ondblclick = () => { label.values.forEach((v) => off.add(`${label.name}\n${v}`)); off.delete(key); redraw(); };
    chips.append(chip);
  }
  document.getElementById("filters")?.append(name, chips);
}

// What is missing goes last in both directions.
document.querySelectorAll(".points th").forEach((head, column) => {
  head.onclick = () => {
    const down = head.ariaSort === "ascending";
    document.querySelectorAll(".points th").forEach((other) => { other.ariaSort = "none"; });
    head.ariaSort = down ? "descending" : "ascending";
    const key = (row) => row.cells[column].dataset.v ?? (row.cells[column].textContent.match(/[a-z]/) ? row.cells[column].textContent : "");
    head.closest("table").tBodies[0].append(...[...rows].sort((a, b) => {
      const [p, q] = [key(a), key(b)];
      if (p === "" || q === "") return (p === "") - (q === "");
      return (down ? -1 : 1) * (isNaN(p) || isNaN(q) ? p.localeCompare(q) : p - q);
    }));
  };
});
rows.forEach((row) => {
  const light = (on) => plots.forEach((plot) => plot.setSeries(on ? shown.indexOf(runs[row.dataset.run]) + 1 : null, { focus: true }, false));
  row.onmouseenter = () => light(true);
  row.onmouseleave = () => light(false);
});

// Norms run over orders of magnitude: a linear axis would show their largest value only.
charts.forEach((chart) => {
  const values = runs.flatMap((run) => run.curves[chart.key]?.y ?? []).filter((v) => v > 0);
  const [low, high] = values.reduce(([l, h], v) => [Math.min(l, v), Math.max(h, v)], [Infinity, 0]);
  document.querySelector(`#${chart.key} .log`).checked = high > 30 * low;
  document.querySelector(`#${chart.key} .log`).onchange = redraw;
});
if (charts.length) {
  smooth.checked = runs.length > 8 && runs.some((run) => run.curves.loss?.x.length > 200);
  x_axis.onchange = smooth.onchange = redraw;
  redraw();
  dark.addEventListener("change", redraw);
  addEventListener("resize", () => [...plots, ...reached].forEach((plot) => plot.setSize({ width: plot.root.parentElement.clientWidth, height: plot.height })));
}
