const ROW_PX = 24;
const ROWS_AROUND = 12; // beyond what is in sight
const FILTER_REST_MS = 250;
const MODEL_ORDER = "layer";
const EXPLANATION =
  "Autocast decides for every operator anew: matrix products and convolutions get their inputs cast to fp16 or bf16 (the lower-precision list), " +
  "some operators that need range or precision get theirs cast to fp32 (the fp32 list), a few take the widest of their inputs (the promote list), " +
  "and all others compute in whatever they are given. Each cast writes a copy. The lists are not the same on a CPU and on CUDA: on a CPU softmax, " +
  "exp, sum and layer norm are on none. A layer whose numbers need the range of fp32 can be kept in it, ticked on the left, in force from the next step: " +
  "it then runs with autocast off, on inputs cast to fp32.";
const EXAMPLE =
  "In the digits demo: choose bf16, press Start and take the map. The matrix products compute in bf16, each after a cast, and cross_entropy in fp32. " +
  "Then tick layers.0 and take it again: that layer is all fp32, and autocast casts what follows it.";
// [column, heading, what it means, position in a row, whether a number]
const TABLE_COLUMNS = [
  ["layer", "layer", "In the order of the first calls", 0, false],
  ["operator", "operator", "As it is called in Python; several of torch's operators may be behind it", 1, false],
  ["in", "in", "The format of what it is called with, before any cast", 3, false],
  ["compute", "computes in", "The format of what it computes with, after the casts", 4, false],
  ["why", "why", "Why it computes in this format", 14, false],
  ["out", "out", "The format of what it returns", 5, false],
  ["casts", "casts", "Casts made for it in the forward pass, and the bytes that they write. A weight is cast once a step", 8, true],
  ["backward", "backward", "The format of what its part of the backward pass computes with", 6, false],
  ["backcasts", "grad casts", "Casts of gradients in its part of the backward pass, and the bytes that they write", 10, true],
  ["calls", "calls", "In the forward pass; recomputes are not counted", 2, true],
  ["cuda", "on CUDA", "Predicted, not run: the list that autocast has it on for CUDA", 16, false],
];
const FORMATS = new Set(["fp32", "fp16", "bf16", "fp64"]);

function sizeText(bytes) {
  if (bytes < 1000) return `${bytes.toFixed(0)} B`;
  let unit = 0;
  for (bytes /= 1000; bytes >= 999.5 && unit < 3; bytes /= 1000) unit++;
  const digits = bytes >= 99.95 ? 0 : bytes >= 9.995 ? 1 : 2;
  return `${bytes.toFixed(digits)} ${["kB", "MB", "GB", "TB"][unit]}`;
}

/** By which colour a format is told, beside its name. */
function toneOf(format) {
  if (format === "") return "none";
  return FORMATS.has(format) ? format : "mixed";
}

function chip(format) {
  return h("span", { class: "ampw-format", "data-format": toneOf(format) }, format);
}

/** Rows of one height in a scrolled view, of which only those in sight and some around are in the page. */
function virtualRows(view, make, spacer) {
  let order = [];
  const made = new Map(); // position → its row
  const [above, below] = [spacer(), spacer()];
  const draw = () => {
    const first = Math.max(0, Math.floor(view.scrollTop / ROW_PX) - ROWS_AROUND);
    const last = Math.min(order.length, Math.ceil((view.scrollTop + (view.clientHeight || 384)) / ROW_PX) + ROWS_AROUND);
    const wanted = order.slice(first, last);
    const keep = new Set(wanted);
    for (const [position, row] of made) {
      if (keep.has(position)) continue;
      if (row.element.contains(document.activeElement)) view.focus({ preventScroll: true });
      row.element.remove();
      made.delete(position);
    }
    let before = above.element;
    wanted.forEach((position, i) => {
      if (!made.has(position)) made.set(position, make(position, first + i));
      const { element } = made.get(position);
      if (before.nextSibling !== element) before.after(element);
      before = element;
    });
    above.setHeight(first * ROW_PX);
    below.setHeight(Math.max(0, order.length - last) * ROW_PX);
  };
  view.addEventListener("scroll", draw, { passive: true });
  const size = new ResizeObserver(draw);
  size.observe(view);
  return {
    ends: [above.element, below.element],
    made,
    draw,
    put(positions, keepPlace) {
      const top = keepPlace ? view.scrollTop : 0;
      for (const row of made.values()) row.element.remove();
      made.clear();
      order = positions;
      below.setHeight(order.length * ROW_PX); // without rows there would be nothing to be scrolled
      view.scrollTop = top;
      draw();
    },
    remove: () => size.disconnect(),
  };
}

function rowSpacer() {
  const cell = h("td", { colspan: TABLE_COLUMNS.length });
  const element = h("tr", { "aria-hidden": "true" }, cell);
  return { element, setHeight: (px) => { cell.style.height = `${px}px`; element.hidden = px === 0; } };
}

function listSpacer() {
  const element = h("li", { "aria-hidden": "true" });
  return { element, setHeight: (px) => { element.style.height = `${px}px`; element.hidden = px === 0; } };
}

export default {
  render({ model, el }) {
    const { body, heading, titleId, setWaiting, showLost, remove } = frame(el, "Number formats by layer and operator", "ampw-dtypes");
    const summary = h("span", { class: "ampw-dim", role: "status" });
    heading.append(summary);
    const take = h("button", { type: "button", onclick: () => asked.ask({ map: true }, { map: true }) });
    const sentence = h("span", { class: "ampw-difference" });
    const stale = h("p", { class: "ampw-sentence ampw-stale", hidden: true });
    const whyNot = h("p", { class: "ampw-sentence ampw-stale", role: "status", hidden: true });
    const explained = h("details", { class: "ampw-explained", open: true }, h("summary", {}, "What is shown"), h("p", { class: "ampw-dim" }, EXPLANATION), h("p", { class: "ampw-dim" }, EXAMPLE));

    // the tree
    const treeId = uid();
    const list = h("ul", { "aria-labelledby": treeId });
    const treeView = h("div", { class: "ampw-scroll", tabindex: "0", role: "region", "aria-labelledby": treeId }, list);
    const legend = h("div", { class: "ampw-legend" }, h("span", { id: treeId }, "Keep in FP32"), h("span", { class: "ampw-dim" }, "the ticked layers"));

    // the table
    const filterId = uid();
    let rest;
    const filter = h("input", {
      type: "text", id: filterId, placeholder: "layers.*.mlp", autocomplete: "off", spellcheck: "false",
      title: "Part of a layer's name, or a pattern: * stands for one part of a dotted name, ** for any number of parts. Several with spaces between.",
      oninput: () => { clearTimeout(rest); rest = setTimeout(applyFilter, FILTER_REST_MS); },
      onkeydown: (event) => {
        if (event.key === "Escape") filter.value = "";
        if (event.key === "Escape" || (event.key === "Enter" && !event.shiftKey)) applyFilter();
      },
    });
    const applyFilter = () => {
      clearTimeout(rest);
      if (filter.value.trim() !== model.get("pattern")) asked.ask({ filter: filter.value });
    };
    const headers = new Map();
    const head = h("tr");
    for (const [column, label, title, , number] of TABLE_COLUMNS) {
      const arrow = h("span", { class: "ampw-arrow", "aria-hidden": "true" });
      const button = h("button", { type: "button", title, onclick: () => sortBy(column) }, label, arrow);
      const cell = h("th", { scope: "col", class: number ? "ampw-number" : "", "aria-sort": "none" }, button);
      headers.set(column, { cell, arrow });
      head.append(cell);
    }
    const lines = h("tbody");
    const table = h("table", { "aria-labelledby": titleId }, h("thead", {}, head), lines);
    const view = h("div", { class: "ampw-scroll", tabindex: "0", role: "region", "aria-labelledby": titleId }, table);
    const nothing = h("p", { class: "ampw-sentence", hidden: true });

    const halves = h("div", { class: "ampw-halves" },
      h("div", { class: "ampw-half-tree" }, legend, treeView),
      h("div", { class: "ampw-half-table" }, h("div", { class: "ampw-pattern" }, h("label", { for: filterId }, "Filter"), filter), view, nothing));
    body.append(h("div", { class: "ampw-choices" }, take, sentence), whyNot, stale, explained, halves);

    let rows = null;
    let layers = null;
    let matching = null;
    let order = [];
    let column = MODEL_ORDER;
    let descending = false;
    let ticked = new Set();
    let inForce = new Set();

    const sortBy = (chosen) => {
      const number = TABLE_COLUMNS.find(([name]) => name === chosen)[4];
      if (chosen === column) descending = !descending;
      else [column, descending] = [chosen, number];
      arrange(false);
    };

    const arrange = (keepPlace) => {
      const positions = matching ?? rows.map((_, i) => i);
      const at = TABLE_COLUMNS.find(([name]) => name === column)[3];
      const sign = descending ? -1 : 1;
      const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
      if (column === MODEL_ORDER) order = descending ? [...positions].reverse() : positions;
      else order = [...positions].sort((i, j) => sign * compare(rows[i][at], rows[j][at]) || i - j);
      for (const [name, { cell, arrow }] of headers) {
        const here = name === column;
        cell.setAttribute("aria-sort", here ? (descending ? "descending" : "ascending") : "none");
        arrow.textContent = here ? (descending ? "▼" : "▲") : "";
      }
      headers.get("cuda").cell.hidden = !model.get("predicts");
      table.setAttribute("aria-rowcount", order.length + 1);
      operators.put(order, keepPlace);
    };

    const casts = (count, bytes, again = "") =>
      h("td", { class: "ampw-number", title: count ? `${count} casts, ${bytes.toLocaleString("en")} bytes${again}` : null }, count ? `${count} · ${sizeText(bytes)}` : "");

    const operatorRow = (position, place) => {
      const [layer, operator, calls, before, compute, after, backward, count, bytes, backCount, backBytes, againCalls, againCasts, againBytes, why, sentence, cuda] = rows[position];
      const again = againCalls ? `; once more in recomputes: ${againCasts}, ${againBytes.toLocaleString("en")} bytes` : "";
      const mono = (text) => h("td", { class: "ampw-mono" }, text);
      const element = h("tr", { "aria-rowindex": place + 2, "data-format": toneOf(compute) },
        h("th", { scope: "row", title: layer }, layer),
        h("td", { class: "ampw-type", title: operator }, operator),
        mono(before), h("td", {}, compute ? chip(compute) : ""), h("td", { class: "ampw-why-cell", title: sentence }, why), mono(after), casts(count, bytes, again),
        mono(backward), casts(backCount, backBytes),
        h("td", { class: "ampw-number" }, calls ? String(calls) : ""));
      if (model.get("predicts")) element.append(h("td", { class: "ampw-why-cell" }, cuda));
      return { element };
    };
    const operators = virtualRows(view, operatorRow, rowSpacer);
    lines.append(...operators.ends);

    const layerRow = (position) => {
      const [name, type, formats, reason] = layers[position];
      const parts = name.split(".");
      const box = h("input", {
        type: "checkbox", "aria-label": `keep ${name} in FP32`,
        onchange: () => asked.ask({ layer: name, on: box.checked }, { [name]: box.checked }),
      });
      const button = h("button", {
        type: "button", class: "ampw-name", title: `${name} (${type}): show its operators`, style: `padding-left: ${12 * (parts.length - 1)}px`,
        onclick: () => { filter.value = /[*?[\s,]/.test(name) || !layers.some(([other]) => other.startsWith(`${name}.`)) ? name : `${name}.**`; applyFilter(); },
      }, parts.at(-1), h("span", { class: "ampw-type-dim" }, type));
      const element = h("li", { class: `ampw-list-row${formats.length ? "" : " ampw-not-called"}` }, box, button, h("span", { class: "ampw-formats" }, ...formats.map(chip)));
      return { element, box, name, reason };
    };
    const tree = virtualRows(treeView, layerRow, listSpacer);
    list.append(...tree.ends);

    const drawTicks = () => {
      const locked = asked.locked();
      for (const [position, { box, name, reason, element }] of tree.made) {
        box.checked = asked.value(name, ticked.has(position));
        const disabled = locked || reason !== "";
        if (box.disabled !== disabled) box.disabled = disabled;
        box.title = reason || `Keep ${name} in FP32`;
        element.classList.toggle("ampw-changed", box.checked !== inForce.has(position));
      }
    };
    treeView.addEventListener("scroll", () => drawTicks(), { passive: true });
    list.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey || event.target.type !== "checkbox") return;
      const boxes = [...list.querySelectorAll("input:enabled")];
      const next = boxes[boxes.indexOf(event.target) + step];
      event.preventDefault();
      next?.focus();
      next?.closest("li").scrollIntoView({ block: "nearest" });
    });

    const draw = () => {
      ticked = new Set(model.get("requested"));
      inForce = new Set(model.get("in_force"));
      if (layers !== model.get("layers")) {
        const first = layers === null;
        layers = model.get("layers");
        tree.put(layers.map((_, i) => i), !first);
      }
      if (rows !== model.get("rows") || matching !== model.get("matching")) {
        const same = rows === model.get("rows");
        rows = model.get("rows");
        matching = model.get("matching");
        arrange(!same);
      }
      if (document.activeElement !== filter && filter.value.trim() !== model.get("pattern")) filter.value = model.get("pattern");
      filter.disabled = asked.locked(); // the names are matched in the kernel
      drawTicks();
      const waits = model.get("pending") || asked.value("map", false);
      take.disabled = asked.locked() || waits || !model.get("available");
      setText(take, waits ? "Taking the map at the next step …" : rows.length ? "Take the map again" : "Take the map");
      setText(sentence, model.get("sentence"));
      setText(stale, model.get("stale"));
      setText(whyNot, model.get("why_not"));
      halves.hidden = !rows.length && !layers.length;
      view.hidden = !order.length;
      setText(nothing, order.length ? "" : rows.length ? `No layer with an operator matches ${model.get("pattern")}` : "No map was taken yet. What is listed then: every operator of a step, its format and its casts");
      setText(summary, !rows.length ? "" : matching ? `${order.length} of ${rows.length} rows` : `${rows.length} rows`);
      const differs = ticked.size !== inForce.size || [...ticked].some((position) => !inForce.has(position));
      setWaiting(differs || asked.waits());
    };
    const asked = asking(model, el, showLost, draw);
    model.on("change", draw);
    draw();
    return () => {
      clearTimeout(rest);
      operators.remove();
      tree.remove();
      remove();
      asked.remove();
    };
  },
};
