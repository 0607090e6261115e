"use strict";
const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
  if (entry.isIntersecting) { seen.unobserve(entry.target); draw(entry.target); }
}), { rootMargin: "200px" });

function inOrder(one, other) {  // cells: numbers, that is data-key or a text that is nothing else, before texts
  const [a, b] = [one, other].map((cell) => cell.dataset.key ?? cell.textContent.trim());
  const [x, y] = [a, b].map((text) => (text === "" ? NaN : Number(text.replace(/,(?=\d{3}(\D|$))/g, ""))));
  return isNaN(x) && isNaN(y) ? a.localeCompare(b, undefined, { numeric: true }) : isNaN(x) - isNaN(y) || x - y;
}
function sortable(table) {
  all("th", table).forEach((head, column) => head.addEventListener("click", () => {
    const up = head.dataset.up !== "1", body = table.tBodies[0], order = (a, b) => inOrder(a.cells[column], b.cells[column]);
    body.append(...[...body.rows].sort((a, b) => (up ? order(a, b) : order(b, a))));
    all("th", table).forEach((each) => delete each.dataset.up);
    head.dataset.up = up ? "1" : "0";
  }));
}
function filters() {
  const body = document.getElementById("config"), search = document.querySelector("[data-search=config]");
  if (!body) return;
  let only = all(".only")[0].dataset.only;
  const show = () => {
    all("tbody tr", body).forEach((row) => { row.hidden = (only && !row.classList.contains(only)) || !row.textContent.toLowerCase().includes(search.value.toLowerCase()); });
    all(".only").forEach((button) => button.setAttribute("aria-pressed", button.dataset.only === only));
  };
  all(".only").forEach((button) => button.addEventListener("click", () => { only = button.dataset.only; show(); }));
  search.addEventListener("input", show);
  show();
}
function episodes(box) {  // by reward and by text
  const [least, most, search, count] = [".least", ".most", "[type=search]", ".count"].map((each) => box.querySelector(each)), cards = all(".card", box);
  const show = () => {
    const low = least.value === "" ? -Infinity : +least.value, high = most.value === "" ? Infinity : +most.value, text = search.value.toLowerCase();
    cards.forEach((card) => { const reward = card.dataset.reward === "" ? NaN : +card.dataset.reward, any = least.value === "" && most.value === ""; card.hidden = !((any || (reward >= low && reward <= high)) && card.textContent.toLowerCase().includes(text)); });
    count.textContent = `${cards.filter((card) => !card.hidden).length} of ${cards.length}`;
  };
  [least, most, search].forEach((each) => each.addEventListener("input", show));
  show();
}

document.getElementById("log").addEventListener("click", (event) => { log = !log; event.target.setAttribute("aria-pressed", log); drawn.forEach(draw); });
document.getElementById("print").addEventListener("click", () => print());
document.getElementById("pick")?.addEventListener("change", (event) => all(".run").forEach((each) => { each.hidden = each.dataset.run !== event.target.value; if (each === all(".run").at(-1)) drawn.forEach(draw); }));
all(".copy").forEach((button) => button.addEventListener("click", async () => {
  const code = button.parentElement.querySelector("code");
  try { await navigator.clipboard.writeText(code.textContent); button.textContent = "Copied"; } catch { getSelection().selectAllChildren(code); }
}));
let before = "light";
addEventListener("beforeprint", () => { before = root.dataset.theme; all(".chart").filter((each) => each.offsetParent).forEach((each) => drawn.add(each)); theme("light"); });
addEventListener("afterprint", () => theme(before));
all(".sortable").forEach(sortable);
all(".episodes").forEach(episodes);
filters();
begin(() => all(".chart").forEach((place) => seen.observe(place)));
