// Draws every chart of the page; the data is JSON in an element of its own, the colours are those of the style sheet.
const charts = JSON.parse(document.getElementById("charts").textContent);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const number = (v) => (v == null ? "–" : v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e6) ? v.toExponential(2)
  : Math.abs(v) >= 100 ? v.toLocaleString("en", { maximumFractionDigits: 0 }) : String(+v.toPrecision(4)));

const decades = (_, ticks) => ticks.map((v) => (Math.abs(Math.log10(v) - Math.round(Math.log10(v))) < 1e-9 ? v : null));

function draw(chart, element) {
  const axis = (values) => ({
    stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false },
    font: "12px system-ui, sans-serif", values: (_, ticks) => ticks.map((v) => (v == null ? "" : values(v))),
  });
  const tick = (v) => (v !== 0 && Math.abs(v) < 1e-3 ? v.toExponential(1).replace(".0e", "e") : Math.abs(v) >= 1e4 ? compact.format(v) : String(+v.toPrecision(4)));
  const y_axis = { ...axis(tick), size: 56 };
  if (chart.log) y_axis.grid.filter = decades;
  const series = chart.series.map((s, i) => ({
    label: s.label, stroke: color(`--s${s.color ?? i % 5}`), width: s.emphasis || s.dash ? 2.5 : 1.5, dash: s.dash ? [6, 5] : undefined,
    spanGaps: true, points: { show: Boolean(s.emphasis), size: 6, fill: color("--card") }, value: (_, v) => number(v),
  }));
  return new uPlot({
    width: element.clientWidth, height: 260, cursor: { sync: { key: "page" } },
    scales: { x: { time: false }, y: chart.log ? { distr: 3 } : chart.from_zero ? { range: (_, low, high) => [0, high * 1.05] } : {} },
    axes: [{ ...axis((v) => compact.format(v)), size: 32 }, y_axis],
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
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
addEventListener("resize", () => drawn.forEach((plot) => plot.setSize({ width: plot.root.parentElement.clientWidth, height: 260 })));
