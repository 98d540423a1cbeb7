// The page's own script, after figure_view.js, whose FigurePage draws each figure.

const root = document.documentElement;
const views = [];

// What `block` in blocks.py has written.
async function readBlock(name) {
  const element = document.getElementById(name);
  if (!element.dataset.packed) return JSON.parse(element.textContent);
  const bytes = Uint8Array.from(atob(element.textContent), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

// As FigurePage knows one of a widget; its plotly.js is there already.
function modelOf({ figure, label }) {
  const values = { figure, label, note: "", asset: "" };
  const asset = { get: () => VERSION };
  return { get: (name) => values[name], on() {}, off() {}, widget_manager: { get_model: async () => asset } };
}

function show(place, described) {
  const still = place.parentElement.querySelector(".still");
  const view = new FigurePage(modelOf(described), place);
  view.along = described.along;
  views.push(view);
  new MutationObserver((_, observer) => {
    observer.disconnect();
    still.hidden = true;
    if (view.along) view.plot.on("plotly_relayout", (changed) => zoomAlong(view, changed));
  }).observe(view.root, { attributes: true, attributeFilter: ["data-draws"] });
}

function zoomAlong(from, changed) {
  const range = ["xaxis.range[0]", "xaxis.range[1]"].map((name) => changed[name]);
  const wanted = range[0] !== undefined ? { "xaxis.range": range } : changed["xaxis.autorange"] ? { "xaxis.autorange": true } : null;
  if (!wanted) return;
  for (const view of views) {
    const axis = view.plot._fullLayout?.xaxis;
    if (view === from || view.along !== from.along || !axis) continue;
    const same = range[0] === undefined ? axis.autorange === true : axis.range.every((end, i) => end === range[i]);
    if (same) continue;
    const described = view.model.get("figure").layout.xaxis; // for when it is drawn anew
    if (range[0] !== undefined) described.range = range;
    else delete described.range;
    view.plotly.relayout(view.plot, wanted);
  }
}

function switchThemes() {
  const group = document.querySelector(".themes");
  const buttons = [...group.querySelectorAll("button")];
  const mark = () => {
    for (const button of buttons) button.setAttribute("aria-pressed", button.dataset.theme === (root.getAttribute("theme") ?? "auto"));
  };
  for (const button of buttons) {
    button.addEventListener("click", () => {
      if (button.dataset.theme === "auto") root.removeAttribute("theme");
      else root.setAttribute("theme", button.dataset.theme);
      mark();
    });
  }
  mark();
  group.hidden = false;
}

// On paper it is light, and as wide as the paper.
function printInLight() {
  let before, opened;
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const details of opened) details.open = true;
    before = root.getAttribute("theme");
    root.setAttribute("theme", "light");
    root.classList.add("printing");
    for (const view of views) view.draw();
  });
  addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
    root.classList.remove("printing");
    if (before === null) root.removeAttribute("theme");
    else root.setAttribute("theme", before);
    for (const view of views) view.draw();
  });
}

if (globalThis.Plotly) {
  (globalThis[LOADED] ??= new Map()).set(VERSION, Promise.resolve(globalThis.Plotly));
  const figures = await readBlock("figures");
  for (const place of document.querySelectorAll("[data-figure]")) show(place, figures[Number(place.dataset.figure)]);
  printInLight();
} else {
  const note = document.createElement("p");
  note.className = "note";
  note.textContent = "The charts need plotly.js from cdn.plot.ly, which could not be loaded. These are pictures of them.";
  document.querySelector("header").after(note);
}
switchThemes();
