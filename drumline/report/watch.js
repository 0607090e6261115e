"use strict";
const MOST = 4000, runs = all(".live"), charts = new Map();
const say = (text) => { document.getElementById("connection").textContent = text; };
const time = (seconds) => { const s = Math.round(seconds), two = (n) => String(n).padStart(2, "0"); return s >= 3600 ? `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}` : `${Math.floor(s / 60)}:${two(s % 60)}`; };
const short = (value) => typeof value !== "number" ? String(value ?? "–") : Math.abs(value) >= 1e4 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
function make(name, text, kind) { const made = document.createElement(name); if (text != null) made.textContent = text; if (kind) made.className = kind; return made; }
let stream, dirty = new Set();

function place(name) {  // of a curve, which all runs share
  if (!charts.has(name)) {
    const figure = make("figure"), box = make("div", null, "chart");
    box.dataset.chart = data.charts.length;
    data.charts.push({ kind: "lines", title: name, series: [] });
    figure.append(make("figcaption", name), box);
    document.getElementById("curves").append(figure);
    charts.set(name, box);
  }
  return charts.get(name);
}
function extend(run, name, points) {
  const box = place(name), chart = data.charts[+box.dataset.chart];
  let line = chart.series.find((each) => each.color === run);
  if (!line) { line = { name: data.names[run], color: run, x: [], y: [] }; chart.series.push(line); chart.series.sort((a, b) => a.color - b.color); }
  points.x.forEach((step, index) => {
    while (line.x.length && line.x.at(-1) >= step) { line.x.pop(); line.y.pop(); }  // done again after a restart
    line.x.push(step); line.y.push(points.y[index]);
  });
  dirty.add(box);
  return line.x.length;
}
function tiles(box, state) {
  const memory = Array.isArray(state.memory) && state.memory.length ? bytes(Math.max(...state.memory)) : "–";
  const rows = { step: `${short(state.step ?? 0)} of ${short(state.steps)}`, ETA: state.eta ? time(state.eta) : "–", loss: short(state.loss), "learning rate": short(state.lr),
    [state.speed_unit || "tokens/s"]: short(state.tokens_per_s), "memory, fullest rank": memory, "planned peak": `${bytes(state.planned) || "–"} of ${bytes(state.limit) || "–"}`,
    goodput: state.goodput == null ? "–" : `${Math.round(100 * state.goodput)}%`, restarts: state.restarts };
  box.replaceChildren(...Object.entries(rows).map(([name, value]) => { const tile = make("div", null, "tile"); tile.append(make("span", name), make("strong", value)); return tile; }));
}
function ranks(box, state) {
  const known = state.ranks || [], memory = Array.isArray(state.memory) ? state.memory : [];
  const count = Math.max(known.length, memory.length), most = Math.max(...memory, state.planned || 0, 1), by = new Map(known.map((each) => [each.rank, each]));
  box.replaceChildren(...Array.from({ length: Math.min(count, 64) }, (_, rank) => {
    const row = make("div", null, "rank"), bar = make("progress"), each = by.get(rank);
    bar.max = most; bar.value = memory[rank] || 0; bar.setAttribute("aria-label", `memory of rank ${rank}`);
    row.append(make("span", `rank ${rank}`), make("b", each ? `${each.phase}${each.seconds >= 2 ? ` · ${time(each.seconds)}` : ""}` : "–", each?.phase), bar, make("span", bytes(memory[rank]) || "–"));
    return row;
  }), ...(count > 64 ? [make("p", `and ${count - 64} more ranks`, "note")] : []));
}
function cards(box, found) {
  const text = (value) => Array.isArray(value) ? value.map((each) => `${each?.role}: ${each?.content}`).join("\n") : String(value ?? "");
  box.className = "cards";
  box.parentElement.hidden = false;
  box.replaceChildren(make("p", `after step ${found.step}`, "note"), ...(Array.isArray(found.shown) ? found.shown : []).filter(Boolean).map((each) => {
    const card = make("div", null, "card"), reward = each.reward === undefined ? [] : [make("b", `reward ${short(each.reward)}`), make("p")];
    card.append(...reward, make("b", "prompt"), make("pre", text(each.prompt)), make("b", "written"), make("pre", text(each.text)));
    if (each.answer != null) card.append(make("b", "the row's answer"), make("pre", text(each.answer)));
    return card;
  }));
}
function happened(box, found) {
  box.parentElement.hidden = false;
  box.prepend(...found.reverse().map((line) => make("p", line)));
  while (box.children.length > 300) box.lastChild.remove();
}
const boxes = runs.map((section) => Object.fromEntries(["status", "plan", "tiles", "ranks", "happened", "samples", "completions"].map((name) => [name, section.querySelector(`.${name}`)])));

function take(message) {
  const { first, runs: news } = JSON.parse(message.data);
  say("live");
  if (first) { data.charts.forEach((chart) => { chart.series = []; }); boxes.forEach((box) => box.happened.replaceChildren()); }
  let longest = 0;
  news.forEach((run, index) => {
    const section = runs[index], box = boxes[index], { state } = run, bar = section.querySelector("progress");
    box.status.textContent = state.status; box.status.className = `status ${state.status}`;
    if (box.plan.textContent !== (state.plan || "")) box.plan.textContent = state.plan || "";
    bar.max = state.steps || 1; bar.value = state.step || 0;
    tiles(box.tiles, state); ranks(box.ranks, state);
    Object.entries(run.points).forEach(([name, points]) => { longest = Math.max(longest, extend(index, name, points)); });
    if (run.lines.length) happened(box.happened, run.lines);
    for (const kind of ["samples", "completions"]) if (run[kind]) cards(box[kind], run[kind]);
  });
  document.title = news.length === 1 ? `${news[0].state.step || 0} of ${news[0].state.steps || "?"} · ${data.names[0]}` : document.title;
  if (!document.hidden) { dirty.forEach(draw); drawn.size && dirty.clear(); }
  if (longest > MOST) connect();  // it comes again, thinned out
}
function connect() {
  stream?.close();
  stream = new EventSource("/events");
  stream.onmessage = take;
  stream.onerror = () => say(stream.readyState === EventSource.CLOSED ? "drumline watch has gone" : "lost, trying again …");
}
document.getElementById("log").addEventListener("click", (event) => { log = !log; event.target.setAttribute("aria-pressed", log); drawn.forEach(draw); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) dirty.forEach(draw); });
begin(connect);
