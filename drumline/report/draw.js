"use strict";
const data = JSON.parse(document.getElementById("values").textContent);
const all = (query, from = document) => [...from.querySelectorAll(query)];
const COLORS = ["#3b6fb6", "#d9793b", "#3f8f6b", "#b5485d", "#7a62a8", "#8a6d3b", "#5b8fa8", "#a85b8f", "#6b7a3f", "#777777"];
const PHASES = ["#3b6fb6", "#d9793b", "#9aa2ab", "#b5485d", "#7a62a8", "#3f8f6b", "#c9c4b8"];
const root = document.documentElement, drawn = new Set();
let log = false, revision = 0;

function remembered(value) {  // a browser may keep nothing of a file
  try { return value ? localStorage.setItem("drumline-theme", value) : localStorage.getItem("drumline-theme"); } catch { return null; }
}
function theme(name) {
  root.dataset.theme = name;
  document.getElementById("theme").textContent = name === "dark" ? "Light" : "Dark";
  drawn.forEach(draw);
}
function ink(name) { return getComputedStyle(root).getPropertyValue(name).trim(); }
function bytes(value) {
  if (value == null) return "";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) { if (value < 1024) return `${+value.toFixed(unit === "B" ? 0 : 2)} ${unit}`; value /= 1024; }
  return `${value.toFixed(2)} TiB`;
}
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");  // Plotly reads tags in texts
function tint(color, alpha) { return color + Math.round(alpha * 255).toString(16).padStart(2, "0"); }

function lines(chart) {
  const traces = [], many = chart.series.length > 12;
  for (const each of chart.series) {
    const color = COLORS[each.color % COLORS.length], group = each.name;
    if (each.low && (each.seeds || chart.series.length === 1)) {
      traces.push({ x: each.x, y: each.high, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false, legendgroup: group });
      traces.push({ x: each.x, y: each.low, mode: "lines", line: { width: 0 }, fill: "tonexty", fillcolor: tint(color, .18), hoverinfo: "skip",
                    showlegend: false, legendgroup: group });
    }
    const text = chart.unit === "bytes" ? each.y.map(bytes) : undefined, value = text ? "%{text}" : "%{y:.5~g}";
    traces.push({ x: each.x, y: each.y, text, name: plain(each.name), legendgroup: group, mode: each.x.length < 40 && !each.member ? "lines+markers" : "lines",
                  marker: { size: 4 }, line: { color: each.member ? tint(color, .45) : color, width: each.member ? 1 : 1.7 }, opacity: many ? .6 : 1,
                  showlegend: !each.member && !many && chart.series.length > 1,
                  hovertemplate: `step %{x:,}: ${value}<extra>${chart.series.length > 1 ? plain(each.name).slice(0, 60) : ""}</extra>` });
  }
  const values = chart.series.flatMap((each) => each.y).filter((value) => value != null), steps = chart.series.flatMap((each) => each.x);
  const middle = (Math.min(...steps) + Math.max(...steps)) / 2;
  const shapes = (chart.marks || []).map((mark) => {
    const side = mark.x > middle ? "right" : "left";  // a label beyond the middle is written to the left of its line, or the edge would cut it
    const label = { text: mark.text, textangle: 0, textposition: "end", xanchor: side, yanchor: "top", font: { size: 10, color: ink("--bad") } };
    return { type: "line", x0: mark.x, x1: mark.x, yref: "paper", y0: 0, y1: 1, line: { color: ink("--bad"), width: 1, dash: "dot" }, label };
  });
  const axis = chart.unit === "bytes" ? ticks(traces) : log ? {} : alone(values);
  return [traces, { shapes, hovermode: many ? "closest" : "x", xaxis: { title: { text: "step", standoff: 6 }, ...alone(steps), ...(steps.every((step) => step < 8) ? { dtick: 1 } : {}) },
    yaxis: { type: log ? "log" : "linear", exponentformat: values.some((value) => Math.abs(value) >= 1) ? "SI" : "e", ...axis } }];
}
function alone(values) {  // a range where all are the same: Plotly's would be from -1 to 1, or a hair's breadth around a step
  const one = values[0];
  return values.length && values.every((value) => value === one) ? { range: one ? [Math.min(0, 2 * one), Math.max(0, 2 * one)] : [-.05, 1] } : {};
}
function ticks(traces) {  // bytes in steps that people read
  const most = Math.max(...traces.flatMap((each) => each.y.filter((value) => value != null)), 1), step = 2 ** Math.ceil(Math.log2(most / 4));
  const values = [0, 1, 2, 3, 4].map((place) => place * step).filter((value) => value <= most * 1.3);
  return { tickvals: values, ticktext: values.map(bytes), rangemode: "tozero", type: "linear" };
}
function bars(chart) {
  const rows = chart.rows.map(plain), grouped = chart.grouped;
  const traces = chart.series.map((each, place) => ({ type: "bar", orientation: "h", y: rows, x: each.x, name: plain(each.name),
    marker: { color: grouped ? COLORS[place] : PHASES[place % PHASES.length] }, text: chart.unit === "bytes" ? each.x.map(bytes) : undefined,
    textposition: "none", hovertemplate: `%{y}: ${chart.unit === "bytes" ? "%{text}" : "%{x:.4~g} s"}<extra>${plain(each.name)}</extra>` }));
  const most = Math.max(...chart.series.flatMap((each) => each.x.map((value) => value || 0)), 1), step = 2 ** Math.ceil(Math.log2(most / 3));
  const values = [0, 1, 2, 3].map((place) => place * step).filter((value) => value <= most * 1.2);
  const axis = chart.unit === "bytes" ? { tickvals: values, ticktext: values.map(bytes) } : { ticksuffix: " s" };
  return [traces, { barmode: grouped ? "group" : "stack", bargap: .3, xaxis: axis, yaxis: { autorange: "reversed", automargin: true }, margin: { l: 84, r: 12, t: 8, b: 42 } }];
}
function heat(chart) {
  const dark = root.dataset.theme === "dark", scale = dark ? [[0, "#1c2025"], [.5, "#2f5c97"], [1, "#a9c8f2"]] : [[0, "#fbfaf7"], [.5, "#8fb2dd"], [1, "#23508f"]];
  const ranks = chart.values[0].map((_, rank) => `rank ${rank}`);
  const few = ranks.length <= 8;
  return [[{ type: "heatmap", x: ranks, y: chart.rows.map(plain), z: chart.values, colorscale: scale, xgap: 2, ygap: 2, texttemplate: few ? "%{z:.3~g}" : undefined,
             hovertemplate: "%{x}, %{y}: %{z:.4~g} s<extra></extra>", colorbar: { thickness: 8, outlinewidth: 0, title: { text: "s" } } }],
          { yaxis: { autorange: "reversed", automargin: true, ticks: "", showgrid: false }, xaxis: { automargin: true, ticks: "", showgrid: false }, margin: { l: 84, r: 12, t: 8, b: 30 } }];
}
const KINDS = { lines, bars, heat };

function draw(place) {
  if (!place.offsetParent) return;  // hidden: it has no size; who shows it draws it
  const chart = data.charts[+place.dataset.chart], [traces, own] = KINDS[chart.kind](chart);
  const grid = { gridcolor: ink("--line"), zerolinecolor: ink("--line"), linecolor: ink("--line"), tickfont: { size: 11 } };
  const legend = { orientation: "h", y: -0.22, traceorder: "normal", font: { size: 11 } };
  Plotly.react(place, traces, { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink("--soft"), family: "inherit" },
    margin: { l: 58, r: 12, t: 8, b: 42 }, legend, hoverlabel: { font: { size: 12 } }, datarevision: ++revision, ...own, xaxis: { ...grid, ...own.xaxis }, yaxis: { ...grid, ...own.yaxis } },
    { responsive: true, displaylogo: false, displayModeBar: matchMedia("(hover: none)").matches ? false : "hover", modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] });
  drawn.add(place);
}

function begin(then) {  // Plotly is large: the page is there before it, and it is run when the browser has shown that
  requestAnimationFrame(() => setTimeout(() => {
    const script = document.createElement("script");
    script.textContent = document.getElementById("plotly").textContent;
    document.head.append(script);
    then();
  }));
}

theme(remembered() || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => { const next = root.dataset.theme === "dark" ? "light" : "dark"; remembered(next); theme(next); });
