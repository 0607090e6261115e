"use strict";
// Charts, which page.js and watch.js share. A script of a page is read from its file: see page.py.

const data = JSON.parse(document.getElementById("values").textContent);
const root = document.documentElement;
// Of runs. picture.py has the same ones.
const COLORS = [
  "#3b6fb6", "#d9793b", "#3f8f6b", "#b5485d", "#7a62a8",
  "#8a6d3b", "#5b8fa8", "#a85b8f", "#6b7a3f", "#777777",
];
// Of the parts that seconds or bytes are split into.
const PARTS = ["#3b6fb6", "#d9793b", "#9aa2ab", "#b5485d", "#7a62a8", "#3f8f6b", "#c9c4b8"];
// More curves than this have thin lines and no legend.
const MOST_IN_LEGEND = 12;
// Fewer points than this are marked.
const FEW_POINTS = 40;

// Elements whose charts have been drawn.
const drawn = new Set();
let log = false;
let revision = 0;

function all(query, from = document) {
  return [...from.querySelectorAll(query)];
}

function bytes(value) {
  if (value == null) {
    return "";
  }
  if (value < 1024) {
    return `${value.toFixed(0)} B`;
  }
  for (const unit of ["KiB", "MiB", "GiB"]) {
    value /= 1024;
    if (value < 1024) {
      return `${Number(value.toFixed(2))} ${unit}`;
    }
  }
  return `${(value / 1024).toFixed(2)} TiB`;
}

// Plotly reads tags in texts.
function plain(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");
}

// Plotly's range of equal values would be from -1 to 1, or a hair's breadth around a step.
function rangeOfEqual(values) {
  const first = values[0];
  if (values.length === 0 || values.some((value) => value !== first)) {
    return {};
  }
  if (first) {
    return { range: [Math.min(0, 2 * first), Math.max(0, 2 * first)] };
  }
  return { range: [-0.05, 1] };
}

// An axis from 0 to a bit more than `most` bytes, with powers of two between its ticks.
function byteTicks(most, intervals, margin) {
  const step = 2 ** Math.ceil(Math.log2(most / intervals));
  const values = [];
  for (let tick = 0; tick <= intervals; tick += 1) {
    if (tick * step <= most * margin) {
      values.push(tick * step);
    }
  }
  return { tickvals: values, ticktext: values.map(bytes) };
}

// Colors and themes

function cssColor(name) {
  return getComputedStyle(root).getPropertyValue(name).trim();
}

function withAlpha(color, alpha) {
  const hex = Math.round(alpha * 255).toString(16).padStart(2, "0");
  return color + hex;
}

function rememberedTheme() {
  // A browser may keep nothing of a file.
  try {
    return localStorage.getItem("drumline-theme");
  } catch {
    return null;
  }
}

function rememberTheme(name) {
  try {
    localStorage.setItem("drumline-theme", name);
  } catch {
    return;
  }
}

function setTheme(name) {
  root.dataset.theme = name;
  document.getElementById("theme").textContent = name === "dark" ? "Light" : "Dark";
  drawn.forEach(draw);
}

// Kinds of charts: each returns [traces, layout] for Plotly.

function lines(chart) {
  const traces = chart.series.flatMap((series) => lineTraces(chart, series));
  const values = chart.series.flatMap((series) => series.y).filter((value) => value != null);
  const steps = chart.series.flatMap((series) => series.x);
  const middle = (Math.min(...steps) + Math.max(...steps)) / 2;
  const xaxis = { title: { text: "step", standoff: 6 }, ...rangeOfEqual(steps) };
  if (steps.every((step) => step < 8)) {
    xaxis.dtick = 1;
  }
  let yaxis = { type: log ? "log" : "linear", exponentformat: "e" };
  if (values.some((value) => Math.abs(value) >= 1)) {
    yaxis.exponentformat = "SI";
  }
  if (chart.unit === "bytes") {
    const most = Math.max(...values, 1);
    yaxis = { ...yaxis, type: "linear", rangemode: "tozero", ...byteTicks(most, 4, 1.3) };
  } else if (!log) {
    yaxis = { ...yaxis, ...rangeOfEqual(values) };
  }
  const hovermode = chart.series.length > MOST_IN_LEGEND ? "closest" : "x";
  const shapes = (chart.marks || []).map((mark) => markShape(mark, middle));
  return [traces, { shapes, hovermode, xaxis, yaxis }];
}

// A curve, and the band between its lowest and highest values if it has one.
function lineTraces(chart, series) {
  const color = COLORS[series.color % COLORS.length];
  const group = series.name;
  const isMany = chart.series.length > MOST_IN_LEGEND;
  const isOneOfSome = chart.series.length > 1;
  const traces = [];
  if (series.low && (series.seed_count || !isOneOfSome)) {
    const band = { x: series.x, mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
    const common = { ...band, showlegend: false, legendgroup: group };
    const fillcolor = withAlpha(color, 0.18);
    traces.push({ ...common, y: series.high });
    traces.push({ ...common, y: series.low, fill: "tonexty", fillcolor });
  }
  const text = chart.unit === "bytes" ? series.y.map(bytes) : undefined;
  const value = text ? "%{text}" : "%{y:.5~g}";
  const hoverName = isOneOfSome ? plain(series.name).slice(0, 60) : "";
  const isMarked = series.x.length < FEW_POINTS && !series.is_group_member;
  traces.push({
    x: series.x,
    y: series.y,
    text,
    name: plain(series.name),
    legendgroup: group,
    mode: isMarked ? "lines+markers" : "lines",
    marker: { size: 4 },
    line: {
      color: series.is_group_member ? withAlpha(color, 0.45) : color,
      width: series.is_group_member ? 1 : 1.7,
    },
    opacity: isMany ? 0.6 : 1,
    showlegend: !series.is_group_member && !isMany && isOneOfSome,
    hovertemplate: `step %{x:,}: ${value}<extra>${hoverName}</extra>`,
  });
  return traces;
}

// A vertical line with a label, which is on the side of the middle: the edge would cut it.
function markShape(mark, middle) {
  const color = cssColor("--bad");
  return {
    type: "line",
    x0: mark.x,
    x1: mark.x,
    yref: "paper",
    y0: 0,
    y1: 1,
    line: { color, width: 1, dash: "dot" },
    label: {
      text: mark.text,
      textangle: 0,
      textposition: "end",
      xanchor: mark.x > middle ? "right" : "left",
      yanchor: "top",
      font: { size: 10, color },
    },
  };
}

function bars(chart) {
  const isBytes = chart.unit === "bytes";
  const colors = chart.grouped ? COLORS : PARTS;
  const value = isBytes ? "%{text}" : "%{x:.4~g} s";
  const traces = chart.series.map((series, index) => ({
    type: "bar",
    orientation: "h",
    x: series.x,
    y: chart.rows.map(plain),
    name: plain(series.name),
    marker: { color: colors[index % colors.length] },
    text: isBytes ? series.x.map(bytes) : undefined,
    textposition: "none",
    hovertemplate: `%{y}: ${value}<extra>${plain(series.name)}</extra>`,
  }));
  let xaxis = { ticksuffix: " s", rangemode: "tozero" };
  if (isBytes) {
    const values = chart.series.flatMap((series) => series.x.map((each) => each || 0));
    xaxis = byteTicks(Math.max(...values, 1), 3, 1.2);
  }
  const layout = {
    barmode: chart.grouped ? "group" : "stack",
    bargap: 0.3,
    xaxis,
    yaxis: { autorange: "reversed", automargin: true },
    margin: { l: 84, r: 12, t: 8, b: 42 },
  };
  return [traces, layout];
}

function heat(chart) {
  let colorscale = [[0, "#fbfaf7"], [0.5, "#8fb2dd"], [1, "#23508f"]];
  if (root.dataset.theme === "dark") {
    colorscale = [[0, "#1c2025"], [0.5, "#2f5c97"], [1, "#a9c8f2"]];
  }
  const ranks = chart.values[0].map((_, rank) => `rank ${rank}`);
  const columns = chart.columns ?? ranks;
  const unit = chart.unit ?? "s";
  const trace = {
    type: "heatmap",
    x: columns,
    y: chart.rows.map(plain),
    z: chart.values,
    colorscale,
    xgap: 2,
    ygap: 2,
    texttemplate: columns.length <= 8 ? "%{z:.3~g}" : undefined,
    hovertemplate: `%{x}, %{y}: %{z:.4~g} ${unit}<extra></extra>`,
    colorbar: { thickness: 8, outlinewidth: 0, title: { text: unit } },
  };
  const axis = { automargin: true, ticks: "", showgrid: false };
  const layout = {
    xaxis: axis,
    yaxis: { ...axis, autorange: "reversed" },
    margin: { l: 84, r: 12, t: 8, b: 30 },
  };
  return [[trace], layout];
}

const KINDS = { lines, bars, heat };

// Draw the chart of an element, or draw it anew. A hidden element has no size: whatever shows it
// draws it.
function draw(element) {
  if (!element.offsetParent) {
    return;
  }
  const chart = data.charts[Number(element.dataset.chart)];
  const [traces, own] = KINDS[chart.kind](chart);
  const line = cssColor("--line");
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, tickfont: { size: 11 } };
  revision += 1;
  const layout = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: cssColor("--soft"), family: "inherit" },
    margin: { l: 58, r: 12, t: 8, b: 42 },
    legend: { orientation: "h", y: -0.22, traceorder: "normal", font: { size: 11 } },
    hoverlabel: { font: { size: 12 } },
    datarevision: revision,
    ...own,
    xaxis: { ...axis, ...own.xaxis },
    yaxis: { ...axis, ...own.yaxis },
  };
  const isTouched = matchMedia("(hover: none)").matches;
  const options = {
    responsive: true,
    displaylogo: false,
    displayModeBar: isTouched ? false : "hover",
    modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"],
  };
  Plotly.react(element, traces, layout, options);
  drawn.add(element);
}

// Run Plotly, then `then`. Plotly is large: the page is there before it, and the browser has shown
// that by then. A tab that nobody looks at is never shown, so a second is waited for at most.
function begin(then) {
  let hasBegun = false;
  const run = () => {
    if (hasBegun) {
      return;
    }
    hasBegun = true;
    const script = document.createElement("script");
    script.textContent = document.getElementById("plotly").textContent;
    document.head.append(script);
    then();
  };
  requestAnimationFrame(() => setTimeout(run));
  setTimeout(run, 1000);
}

const isDarkWanted = matchMedia("(prefers-color-scheme: dark)").matches;
setTheme(rememberedTheme() || (isDarkWanted ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => {
  const next = root.dataset.theme === "dark" ? "light" : "dark";
  rememberTheme(next);
  setTheme(next);
});
document.getElementById("log").addEventListener("click", (event) => {
  log = !log;
  event.target.setAttribute("aria-pressed", log);
  drawn.forEach(draw);
});
