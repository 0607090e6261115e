"use strict";
// A page of one run or of several: charts that are drawn once they are near the window, tables that
// can be sorted, filters. It follows draw.js.

const observer = new IntersectionObserver(drawVisible, { rootMargin: "200px" });

function drawVisible(entries) {
  for (const entry of entries) {
    if (entry.isIntersecting) {
      observer.unobserve(entry.target);
      draw(entry.target);
    }
  }
}

// Tables

// The number that a cell is sorted by; NaN if it is sorted by its text.
function numberOf(text) {
  const withoutCommas = text.replace(/,(?=\d{3}(\D|$))/g, "");
  return text === "" ? NaN : Number(withoutCommas);
}

// Order two cells: numbers by size, before texts, which are in alphabetical order.
function compareCells(first, second) {
  const firstText = first.dataset.key ?? first.textContent.trim();
  const secondText = second.dataset.key ?? second.textContent.trim();
  const firstNumber = numberOf(firstText);
  const secondNumber = numberOf(secondText);
  if (isNaN(firstNumber) && isNaN(secondNumber)) {
    return firstText.localeCompare(secondText, undefined, { numeric: true });
  }
  if (isNaN(firstNumber) !== isNaN(secondNumber)) {
    return isNaN(firstNumber) ? 1 : -1;
  }
  return firstNumber - secondNumber;
}

function makeSortable(table) {
  const heads = all("th", table);
  heads.forEach((head, column) => {
    head.addEventListener("click", () => {
      const isUpward = head.dataset.up !== "1";
      const direction = isUpward ? 1 : -1;
      const body = table.tBodies[0];
      const rows = [...body.rows];
      rows.sort((a, b) => direction * compareCells(a.cells[column], b.cells[column]));
      body.append(...rows);
      heads.forEach((each) => delete each.dataset.up);
      head.dataset.up = isUpward ? "1" : "0";
    });
  });
}

// Filters

function filterConfig() {
  const table = document.getElementById("config");
  if (!table) {
    return;
  }
  const search = document.querySelector("[data-search=config]");
  const buttons = all(".only");
  let only = buttons[0].dataset.only;
  const update = () => {
    const text = search.value.toLowerCase();
    for (const row of all("tbody tr", table)) {
      const isOfKind = !only || row.classList.contains(only);
      row.hidden = !isOfKind || !row.textContent.toLowerCase().includes(text);
    }
    for (const button of buttons) {
      button.setAttribute("aria-pressed", button.dataset.only === only);
    }
  };
  for (const button of buttons) {
    button.addEventListener("click", () => {
      only = button.dataset.only;
      update();
    });
  }
  search.addEventListener("input", update);
  update();
}

// Whether a card has the mark that is chosen.
function hasMark(card, choice) {
  return choice === "" || card.dataset.marks.split(" ").includes(choice);
}

// Show the episodes whose reward, mark and text are asked for.
function filterEpisodes(box) {
  const least = box.querySelector(".least");
  const most = box.querySelector(".most");
  // Absent if no episode has a mark.
  const mark = box.querySelector(".mark");
  const search = box.querySelector("[type=search]");
  const cards = all(".card", box);
  const update = () => {
    const isAnyReward = least.value === "" && most.value === "";
    const low = least.value === "" ? -Infinity : Number(least.value);
    const high = most.value === "" ? Infinity : Number(most.value);
    const text = search.value.toLowerCase();
    let shown = 0;
    for (const card of cards) {
      const reward = card.dataset.reward === "" ? NaN : Number(card.dataset.reward);
      const isInRange = isAnyReward || (reward >= low && reward <= high);
      const isMarked = hasMark(card, mark?.value ?? "");
      const hasText = card.textContent.toLowerCase().includes(text);
      card.hidden = !isInRange || !isMarked || !hasText;
      shown += card.hidden ? 0 : 1;
    }
    box.querySelector(".count").textContent = `${shown} of ${cards.length}`;
  };
  for (const input of [least, most, search]) {
    input.addEventListener("input", update);
  }
  mark?.addEventListener("change", update);
  update();
}

// Buttons

document.getElementById("print").addEventListener("click", () => print());

document.getElementById("pick")?.addEventListener("change", (event) => {
  for (const run of all(".run")) {
    run.hidden = run.dataset.run !== event.target.value;
  }
  drawn.forEach(draw);
});

for (const button of all(".copy")) {
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
    }
  });
}

// What is printed is light, and has all charts.
let themeBeforePrint = "light";
addEventListener("beforeprint", () => {
  themeBeforePrint = root.dataset.theme;
  for (const element of all(".chart")) {
    if (element.offsetParent) {
      drawn.add(element);
    }
  }
  setTheme("light");
});
addEventListener("afterprint", () => setTheme(themeBeforePrint));

all(".sortable").forEach(makeSortable);
all(".episodes").forEach(filterEpisodes);
filterConfig();
begin(() => {
  for (const element of all(".chart")) {
    observer.observe(element);
  }
});
