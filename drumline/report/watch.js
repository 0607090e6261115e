"use strict";
// The page of `drumline watch`: it shows runs while they go on, from the messages of watch.py. It
// follows draw.js.

// Of a curve with more points the page asks for the whole curve again, which watch.py thins out.
const MOST_POINTS = 4000;
const MOST_RANKS = 64;
const MOST_LINES = 300;

const sections = all(".live");
const PARTS_OF_SECTION = [
  "status", "plan", "tiles", "ranks", "happened", "samples", "completions",
];
// For each run, the elements of its section by their class.
const elementsOfRun = sections.map((section) => {
  const pairs = PARTS_OF_SECTION.map((name) => [name, section.querySelector(`.${name}`)]);
  return Object.fromEntries(pairs);
});
// The element of each curve's chart, which all runs share.
const charts = new Map();
// Elements whose charts have new points that are not drawn yet.
const undrawn = new Set();
let stream;

function say(text) {
  document.getElementById("connection").textContent = text;
}

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text != null) {
    element.textContent = text;
  }
  if (className) {
    element.className = className;
  }
  return element;
}

// Formats

function twoDigits(number) {
  return String(number).padStart(2, "0");
}

function duration(value) {
  const seconds = Math.round(value);
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) {
    return `${minutes}:${twoDigits(seconds % 60)}`;
  }
  const hours = Math.floor(minutes / 60);
  return `${hours}:${twoDigits(minutes % 60)}:${twoDigits(seconds % 60)}`;
}

function short(value) {
  if (typeof value !== "number") {
    return String(value ?? "–");
  }
  if (Math.abs(value) >= 1e4) {
    return Math.round(value).toLocaleString("en");
  }
  return String(Number(value.toPrecision(4)));
}

// Curves

function chartElement(name) {
  if (!charts.has(name)) {
    const element = make("div", null, "chart");
    element.dataset.chart = data.charts.length;
    data.charts.push({ kind: "lines", title: name, series: [] });
    const figure = make("figure");
    figure.append(make("figcaption", name), element);
    document.getElementById("curves").append(figure);
    charts.set(name, element);
  }
  return charts.get(name);
}

function seriesOfRun(chart, run) {
  let series = chart.series.find((each) => each.color === run);
  if (!series) {
    series = { name: data.names[run], color: run, x: [], y: [] };
    chart.series.push(series);
    chart.series.sort((a, b) => a.color - b.color);
  }
  return series;
}

// Add points to a run's curve; return how many it has.
function extend(run, name, points) {
  const element = chartElement(name);
  const series = seriesOfRun(data.charts[Number(element.dataset.chart)], run);
  points.x.forEach((step, index) => {
    // Steps that are done again after a restart replace those before.
    while (series.x.length && series.x.at(-1) >= step) {
      series.x.pop();
      series.y.pop();
    }
    series.x.push(step);
    series.y.push(points.y[index]);
  });
  undrawn.add(element);
  return series.x.length;
}

function drawNew() {
  if (document.hidden) {
    return;
  }
  for (const element of undrawn) {
    draw(element);
    if (drawn.has(element)) {
      undrawn.delete(element);
    }
  }
}

// Parts of a run's section

function memoryOf(state) {
  return Array.isArray(state.memory) ? state.memory : [];
}

function showTiles(box, state) {
  const memory = memoryOf(state);
  const values = {
    step: `${short(state.step ?? 0)} of ${short(state.steps)}`,
    ETA: state.eta ? duration(state.eta) : "–",
    loss: short(state.loss),
    "learning rate": short(state.lr),
    [state.speed_unit || "tokens/s"]: short(state.tokens_per_s),
    "memory, fullest rank": memory.length ? bytes(Math.max(...memory)) : "–",
    "planned peak": `${bytes(state.planned) || "–"} of ${bytes(state.limit) || "–"}`,
    goodput: state.goodput == null ? "–" : `${Math.round(100 * state.goodput)}%`,
    restarts: state.restarts,
  };
  const tiles = Object.entries(values).map(([name, value]) => {
    const tile = make("div", null, "tile");
    tile.append(make("span", name), make("strong", value));
    return tile;
  });
  box.replaceChildren(...tiles);
}

function showRanks(box, state) {
  const memory = memoryOf(state);
  const known = new Map((state.ranks || []).map((each) => [each.rank, each]));
  const count = Math.max(known.size, memory.length);
  const most = Math.max(...memory, state.planned || 0, 1);
  const rows = [];
  for (let rank = 0; rank < Math.min(count, MOST_RANKS); rank += 1) {
    rows.push(rankRow(rank, known.get(rank), memory[rank], most));
  }
  if (count > MOST_RANKS) {
    rows.push(make("p", `and ${count - MOST_RANKS} more ranks`, "note"));
  }
  box.replaceChildren(...rows);
}

// `found`: the phase that the rank is in, and for how many seconds, if that is known.
function rankRow(rank, found, memory, most) {
  const bar = make("progress");
  bar.max = most;
  bar.value = memory || 0;
  bar.setAttribute("aria-label", `memory of rank ${rank}`);
  let phase = "–";
  if (found) {
    phase = found.seconds >= 2 ? `${found.phase} · ${duration(found.seconds)}` : found.phase;
  }
  const row = make("div", null, "rank");
  row.append(
    make("span", `rank ${rank}`),
    make("b", phase, found?.phase),
    bar,
    make("span", bytes(memory) || "–"),
  );
  return row;
}

function asText(value) {
  if (Array.isArray(value)) {
    return value.map((message) => `${message?.role}: ${message?.content}`).join("\n");
  }
  return String(value ?? "");
}

// Make the elements of an episode's messages: who speaks, and what.
function turnElements(messages) {
  const elements = [];
  for (const message of messages.filter(Boolean)) {
    let title = message.name ? `${message.role} ${message.name}` : message.role;
    if (message.reward != null) {
      title += ` · reward ${short(message.reward)}`;
    }
    const lines = message.content ? [message.content] : [];
    const calls = Array.isArray(message.tool_calls) ? message.tool_calls : [];
    for (const call of calls) {
      const { name, arguments: values } = call?.function ?? {};
      // Long arguments are the beginning of their JSON already.
      const text = typeof values === "string" ? values : JSON.stringify(values);
      lines.push(`calls ${name} ${text}`);
    }
    elements.push(make("b", title), make("pre", lines.join("\n")));
  }
  return elements;
}

// Show texts that the model has written, with their prompts and rewards.
function showCards(box, found) {
  const texts = Array.isArray(found.shown) ? found.shown.filter(Boolean) : [];
  const cards = texts.map((shown) => {
    const card = make("div", null, "card");
    if (shown.reward !== undefined) {
      card.append(make("b", `reward ${short(shown.reward)}`), make("p"));
    }
    if (Array.isArray(shown.messages)) {
      card.append(...turnElements(shown.messages));
    } else {
      card.append(make("b", "prompt"), make("pre", asText(shown.prompt)));
      card.append(make("b", "written"), make("pre", asText(shown.text)));
    }
    if (shown.answer != null) {
      card.append(make("b", "the row's answer"), make("pre", asText(shown.answer)));
    }
    return card;
  });
  box.className = "cards";
  box.parentElement.hidden = false;
  box.replaceChildren(make("p", `after step ${found.step}`, "note"), ...cards);
}

// Add lines of what happened, the newest first.
function showLines(box, found) {
  box.parentElement.hidden = false;
  box.prepend(...found.reverse().map((line) => make("p", line)));
  while (box.children.length > MOST_LINES) {
    box.lastChild.remove();
  }
}

// Show the news of one run; return the number of points of its longest curve.
function showRun(index, run) {
  const { state } = run;
  const box = elementsOfRun[index];
  box.status.textContent = state.status;
  box.status.className = `status ${state.status}`;
  // What is equal stays, so that a selection in it does.
  if (box.plan.textContent !== (state.plan || "")) {
    box.plan.textContent = state.plan || "";
  }
  const bar = sections[index].querySelector("progress");
  bar.max = state.steps || 1;
  bar.value = state.step || 0;
  showTiles(box.tiles, state);
  showRanks(box.ranks, state);
  if (run.lines.length) {
    showLines(box.happened, run.lines);
  }
  for (const kind of ["samples", "completions"]) {
    if (run[kind]) {
      showCards(box[kind], run[kind]);
    }
  }
  let longest = 0;
  for (const [name, points] of Object.entries(run.points)) {
    longest = Math.max(longest, extend(index, name, points));
  }
  return longest;
}

// Messages

function take(message) {
  const { first: isFirst, runs } = JSON.parse(message.data);
  say("live");
  if (isFirst) {
    for (const chart of data.charts) {
      chart.series = [];
    }
    for (const box of elementsOfRun) {
      box.happened.replaceChildren();
    }
  }
  const longest = Math.max(0, ...runs.map((run, index) => showRun(index, run)));
  if (runs.length === 1) {
    const { state } = runs[0];
    document.title = `${state.step || 0} of ${state.steps || "?"} · ${data.names[0]}`;
  }
  drawNew();
  // A new stream begins with all curves, thinned out by the server.
  if (longest > MOST_POINTS) {
    connect();
  }
}

function connect() {
  stream?.close();
  stream = new EventSource("/events");
  stream.onmessage = take;
  stream.onerror = () => {
    const isClosed = stream.readyState === EventSource.CLOSED;
    say(isClosed ? "drumline watch has gone" : "lost, trying again …");
  };
}

document.addEventListener("visibilitychange", drawNew);
begin(connect);
