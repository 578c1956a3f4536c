// What runs reached against a number that was swept: a line for the runs that differ in this number alone.
let reached = [];

function draw_outcome(chart) {
  const place = document.querySelector(`#${chart.key} .plot`), text = document.querySelector(`#${chart.key} .readout`);
  const curves = chart.curves.filter((curve) => curve.runs.some((i) => shown.includes(runs[i])));
  let lit = 0;
  const say = (plot) => {
    const curve = curves[lit - 1], at = plot.cursor.idxs?.[lit];
    text.replaceChildren(curve ? "" : "Point at a line to see which one it is.");
    if (!curve) return;
    text.append(Object.assign(document.createElement("b"), { textContent: curve.name }));
    if (at != null && plot.data[lit][at] != null) text.append(` · ${tick(plot.data[0][at])} · ${number(plot.data[lit][at])}`);
  };
  const [x, y] = axes(false, tick);
  // The runs of a line share the colour, unless it stands for the number itself; lines of one colour differ in dashes.
  const of_line = (curve, i) => (colour.name === chart.label || colour.name === "point" ? paint(i, curves.length) : of_run(runs[curve.runs[0]]));
  const seen = {};
  const line = (curve, i) => {
    const stroke = of_line(curve, i), again = (seen[stroke] = (seen[stroke] ?? -1) + 1);
    return { label: curve.name, stroke, dash: [[], [7, 4], [2, 3]][again % 3], width: 1.8, spanGaps: true, points: { show: true, size: 6, fill: color("--card") } };
  };
  return new uPlot({
    width: place.clientWidth, height: 280, legend: { show: false }, focus: { alpha: 0.15 },
    cursor: { focus: { prox: 24 }, dataIdx: nearest },
    scales: { x: chart.log ? { time: false, distr: 3 } : { time: false } },
    axes: [x, y], padding: [8, 16, 0, 0],
    series: [{}, ...curves.map(line)],
    hooks: { ready: [say], setCursor: [say], setSeries: [(plot, i) => { lit = i ?? 0; say(plot); }] },
  }, curves.length ? uPlot.join(curves.map((curve) => [curve.x, curve.y])) : [[]], place);
}

function redraw_outcomes() {
  reached.forEach((plot) => plot.destroy());
  reached = data.outcomes.map(draw_outcome);
}
