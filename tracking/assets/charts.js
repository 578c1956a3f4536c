// Draws every chart of the report page of one run.
const charts = data;

function draw(chart, element) {
  const series = chart.series.map((s, i) => ({
    label: s.label, stroke: color(`--s${s.color ?? i % 5}`), width: s.emphasis || s.dash ? 2.5 : 1.5, dash: s.dash ? [6, 5] : undefined,
    spanGaps: true, points: { show: Boolean(s.emphasis), size: 6, fill: color("--card") }, value: (_, v) => number(v),
  }));
  return new uPlot({
    width: element.clientWidth, height: 260, cursor: { sync: { key: "page" } },
    scales: { x: { time: false }, y: y_scale(chart.log, chart.from_zero) },
    axes: axes(chart.log),
    padding: [8, 12, 0, 0],
    series: [{ label: "tokens", value: (_, v) => (v == null ? "–" : v.toLocaleString("en")) }, ...series],
  }, [chart.x, ...chart.series.map((s) => s.values)], element);
}

let drawn = [];
function drawAll() {
  drawn.forEach((plot) => plot.destroy());
  drawn = charts.map((chart, i) => draw(chart, document.getElementById(`chart${i}`)));
}
drawAll();
dark.addEventListener("change", drawAll);
addEventListener("resize", () => drawn.forEach((plot) => plot.setSize({ width: plot.root.parentElement.clientWidth, height: 260 })));
