// What the scripts of all pages share: their data (JSON in an element of its own), colours of the style sheet, numbers, axes.
const data = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const number = (v) => (v == null ? "–" : v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e6) ? v.toExponential(2)
  : Math.abs(v) >= 100 ? v.toLocaleString("en", { maximumFractionDigits: 0 }) : String(+v.toPrecision(4)));
const tick = (v) => (v !== 0 && Math.abs(v) < 1e-3 ? v.toExponential(1).replace(".0e", "e") : Math.abs(v) >= 1e4 ? compact.format(v) : String(+v.toPrecision(4)));

// The ticks of a logarithmic axis that get a number: every one within a decade, 1, 2 and 5 within two, else powers of ten.
function rounds(plot, ticks) {
  const { min, max } = plot.scales.y;
  const wanted = max / min <= 10 ? [1, 2, 3, 4, 5, 6, 7, 8, 9] : max / min <= 100 ? [1, 2, 5] : [1];
  return ticks.map((v) => (wanted.includes(+(v / 10 ** Math.floor(Math.log10(v) + 1e-9)).toPrecision(6)) ? v : null));
}

function axes(log, x_values = (v) => compact.format(v), x_steps = undefined) {
  const axis = (values) => ({
    stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false },
    font: "12px system-ui, sans-serif", values: (_, ticks) => ticks.map((v) => (v == null ? "" : values(v))),
  });
  const y = { ...axis(tick), size: 56 };
  if (log) {
    y.filter = rounds;
    y.grid.filter = rounds;
  }
  return [{ ...axis(x_values), size: 32, ...(x_steps && { incrs: x_steps }) }, y];
}

const y_scale = (log, from_zero) => (log ? { distr: 3, range: (_, low, high) => [low / 1.1, high * 1.1] }
  : from_zero ? { range: (_, low, high) => [0, high * 1.05] } : {});
