
"use strict";
(function () {
  const svg = document.documentElement;
  const margin = +svg.dataset.margin, character = +svg.dataset.character;
  const room = svg.viewBox.baseVal.width - 2 * margin;
  const reset = document.getElementById("reset"), found = document.getElementById("found");
  const about = document.getElementById("about"), usual = about.textContent;
  const boxes = Array.from(document.querySelectorAll("#boxes > g")).map(function (group) {
    const rect = group.querySelector("rect"), title = group.querySelector("title").textContent;
    return {
      group: group, rect: rect, title: title, text: group.querySelector("text"),
      name: title.slice(0, title.lastIndexOf(": ")),
      x: +rect.getAttribute("x"), width: +rect.getAttribute("width"), y: +rect.getAttribute("y"),
    };
  });
  let whole = boxes[0];

  // Puts a box where it is seen from the chosen one, with as much of its name as it has room for.
  function place(box, x, width) {
    box.rect.setAttribute("x", x);
    box.rect.setAttribute("width", width);
    const letters = Math.floor((width - 6) / character);
    if (letters < 3) {
      if (box.text) box.text.textContent = "";
      return;
    }
    if (!box.text) {
      box.text = document.createElementNS("http://www.w3.org/2000/svg", "text");
      box.text.setAttribute("y", box.y + 12.5);
      box.group.appendChild(box.text);
    }
    box.text.setAttribute("x", x + 3);
    box.text.textContent =
      box.name.length <= letters ? box.name : box.name.slice(0, letters - 1) + "\u2026";
  }

  function zoom(to) {
    whole = to;
    const factor = room / to.width, slack = 0.006;
    for (const box of boxes) {
      const inside = box.x >= to.x - slack && box.x + box.width <= to.x + to.width + slack;
      const below = box.y > to.y && box.x <= to.x + slack && box.x + box.width >= to.x + to.width - slack;
      const shown = below || (inside && box.y <= to.y);
      box.group.style.display = shown ? "" : "none";
      box.group.classList.toggle("up", below);
      if (below) place(box, margin, room);
      else if (shown) place(box, margin + (box.x - to.x) * factor, box.width * factor);
    }
    reset.style.visibility = to === boxes[0] ? "hidden" : "visible";
    count();
  }

  // How much of what is shown the marked boxes hold; one on top of another counts once.
  function count() {
    const spans = boxes
      .filter(function (box) { return box.group.classList.contains("hit") && box.group.style.display !== "none"; })
      .map(function (box) {
        return [Math.max(box.x, whole.x), Math.min(box.x + box.width, whole.x + whole.width)];
      })
      .sort(function (a, b) { return a[0] - b[0]; });
    let held = 0, end = -1;
    for (const span of spans) {
      if (span[1] <= end) continue;
      held += span[1] - Math.max(span[0], end);
      end = span[1];
    }
    found.textContent = document.querySelector("#boxes .hit")
      ? "matched: " + (100 * held / whole.width).toFixed(1) + " %" : found.dataset.none || "";
  }

  function search(text) {
    found.dataset.none = "";
    let pattern = null;
    if (text) {
      try {
        pattern = new RegExp(text, "i");
      } catch (error) {
        pattern = new RegExp(text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "i");
      }
      found.dataset.none = "matched: nothing";
    }
    for (const box of boxes) {
      box.group.classList.toggle("hit", !!pattern && pattern.test(box.name));
    }
    count();
  }

  function ask() {
    const text = window.prompt("Functions that match (a regular expression; nothing clears):", "");
    if (text !== null) search(text);
  }

  for (const box of boxes) {
    box.group.addEventListener("click", function () { zoom(box); });
    box.group.addEventListener("mouseenter", function () { about.textContent = box.title; });
    box.group.addEventListener("mouseleave", function () { about.textContent = usual; });
  }
  reset.addEventListener("click", function () { zoom(boxes[0]); });
  document.getElementById("search").addEventListener("click", ask);
  window.addEventListener("keydown", function (event) {
    if (event.key === "F3" || ((event.ctrlKey || event.metaKey) && event.key === "f")) {
      event.preventDefault();
      ask();
    }
    if (event.key === "Escape") zoom(boxes[0]);
  });
})();
