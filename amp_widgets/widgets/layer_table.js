const ROW_PX = 24;
const VIEW_PX = 384; // as in memory.css; the user can make it higher
const ROWS_AROUND = 12; // beyond what is in sight
const FILTER_REST_MS = 250;
const MODEL_ORDER = "name";
const NUMBERS_FROM = 5; // in a row of `rows`
const TABLE_COLUMNS = [
  ["name", "layer", "In the order of the model; names are indented by depth"],
  ["type", "type", "The class of the layer"],
  ["parameters", "parameter bytes", "Bytes of the parameters of the layer and of those within it; how many they are, see the tree of layers"],
  ["held", "held", "Activations made in the layer that stay in memory from its forward to its backward pass; neither parameters nor optimizer state"],
  ["output", "output", "What its last call returned"],
  ["forward", "forward", "Time of its forward pass"],
  ["backward", "backward", "Time of its backward pass"],
  ["saves", "≈ saves", "An estimate, not measured: about what checkpointing it would free from forward to backward: held minus output. The peak of the step falls by less where it is reached elsewhere; what would have been free when memory ran out is in the report"],
  ["costs", "≈ costs", "An estimate: what checkpointing it would cost in each step is its forward pass once more. Where it is in force: how long it was computed again, measured"],
  ["dtype", "dtype", "The format that it computes in"],
];
const SIZES = new Set(["parameters", "held", "output", "saves"]);
const TIMES = new Set(["forward", "backward", "costs"]);
const TEXT_AT = { name: 0, type: 1, dtype: 2 };
const NUMBER_AT = { parameters: 0, held: 1, output: 2, forward: 3, backward: 4, saves: 5, costs: 6 };

// As bytes_text and seconds_text in text.py.
function sizeText(bytes) {
  if (bytes === null) return "–";
  if (bytes < 1000) return `${bytes.toFixed(0)} B`;
  let unit = 0;
  for (bytes /= 1000; bytes >= 999.5 && unit < 3; bytes /= 1000) unit++;
  return `${threeDigits(bytes)} ${["kB", "MB", "GB", "TB"][unit]}`;
}

function timeText(seconds) {
  if (seconds === null) return "–";
  if (seconds * 1e6 < 999.5) return `${threeDigits(seconds * 1e6)} µs`;
  if (seconds * 1e3 < 999.5) return `${threeDigits(seconds * 1e3)} ms`;
  return `${threeDigits(seconds)} s`;
}

function threeDigits(value) {
  if (Math.abs(value) >= 99.95) return Math.round(value).toLocaleString("en");
  return value.toFixed(Math.abs(value) >= 9.995 ? 1 : 2);
}

function valueOf(row, column) {
  return column in TEXT_AT ? row[TEXT_AT[column]] : row[NUMBERS_FROM + NUMBER_AT[column]];
}

/** Positions of rows in order, the model itself first; what is not known comes last either way. */
function sorted(rows, positions, column, descending, whole) {
  if (positions.includes(whole)) return [whole, ...sorted(rows, positions.filter((i) => i !== whole), column, descending, -1)];
  const sign = descending ? -1 : 1;
  if (column === MODEL_ORDER) return descending ? [...positions].reverse() : positions;
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  return [...positions].sort((i, j) => {
    const [a, b] = [valueOf(rows[i], column), valueOf(rows[j], column)];
    if (a === null || b === null) return (a === null) - (b === null) || i - j;
    return sign * compare(a, b) || i - j;
  });
}

export default {
  render({ model, el }) {
    const { body, heading, titleId, setWaiting, showLost, remove } = frame(el, "Memory and time by layer", "ampw-layer-table");
    const summary = h("span", { class: "ampw-dim ampw-total", role: "status" });
    const caption = h("span", { class: "ampw-dim ampw-caption", hidden: true });
    heading.append(caption, summary);
    const filterId = uid();
    const filter = h("input", {
      type: "text", id: filterId, placeholder: "layers.*.mlp", autocomplete: "off", spellcheck: "false",
      title: "Part of a name, or a pattern: * stands for one part of a dotted name, ** for any number of parts. Several with spaces between.",
      oninput: () => { clearTimeout(rest); rest = setTimeout(applyFilter, FILTER_REST_MS); },
      onkeydown: (event) => {
        if (event.key === "Escape") filter.value = "";
        if (event.key === "Escape" || (event.key === "Enter" && !event.shiftKey)) applyFilter();
      },
    });
    let rest;
    const applyFilter = () => {
      clearTimeout(rest);
      if (filter.value.trim() !== model.get("pattern")) asked.ask({ filter: filter.value });
    };
    const headers = new Map();
    const head = h("tr", {}, h("th", { scope: "col", class: "ampw-check" }, h("span", { class: "ampw-dim", title: "Checkpointed" }, "ckpt")));
    for (const [column, label, title] of TABLE_COLUMNS) {
      const arrow = h("span", { class: "ampw-arrow", "aria-hidden": "true" });
      const button = h("button", { type: "button", title, onclick: () => sortBy(column) }, label, arrow);
      const cell = h("th", { scope: "col", class: column in NUMBER_AT ? "ampw-number" : "", "aria-sort": "none" }, button);
      headers.set(column, { cell, arrow });
      head.append(cell);
    }
    const above = h("tr", { "aria-hidden": "true" }, h("td", { colspan: TABLE_COLUMNS.length + 1 }));
    const below = h("tr", { "aria-hidden": "true" }, h("td", { colspan: TABLE_COLUMNS.length + 1 }));
    const lines = h("tbody", {}, above, below);
    const table = h("table", { "aria-labelledby": titleId }, h("thead", {}, head), lines);
    const view = h("div", { class: "ampw-scroll", tabindex: "0", role: "region", "aria-labelledby": titleId }, table);
    const nothing = h("p", { class: "ampw-sentence", hidden: true });
    body.append(h("div", { class: "ampw-pattern" }, h("label", { for: filterId }, "Filter"), filter), view, nothing);

    let rows = null;
    let matching = null;
    let order = [];
    let column = MODEL_ORDER;
    let descending = false;
    let ticked = new Set();
    let inForce = new Set();
    let proposed = new Set();
    const made = new Map(); // position → its row in the page

    const sortBy = (chosen) => {
      if (chosen === column) descending = !descending;
      else [column, descending] = [chosen, chosen in NUMBER_AT];
      arrange();
      view.scrollTop = 0;
      drawRows();
    };

    const arrange = () => {
      order = sorted(rows, matching ?? rows.map((_, i) => i), column, descending, model.get("whole"));
      for (const [name, { cell, arrow }] of headers) {
        const here = name === column;
        cell.setAttribute("aria-sort", here ? (descending ? "descending" : "ascending") : "none");
        arrow.textContent = here ? (descending ? "▼" : "▲") : "";
      }
      for (const line of made.values()) line.element.remove();
      made.clear();
      table.setAttribute("aria-rowcount", order.length + 1);
    };

    // Only the rows in sight and some around are in the page.
    const drawRows = () => {
      const first = Math.max(0, Math.floor(view.scrollTop / ROW_PX) - ROWS_AROUND);
      const last = Math.min(order.length, Math.ceil((view.scrollTop + Math.max(view.clientHeight, VIEW_PX)) / ROW_PX) + ROWS_AROUND);
      const wanted = order.slice(first, last);
      const keep = new Set(wanted);
      for (const [position, line] of made) {
        if (keep.has(position)) continue;
        if (line.element.contains(document.activeElement)) view.focus({ preventScroll: true });
        line.element.remove();
        made.delete(position);
      }
      let before = above;
      wanted.forEach((position, i) => {
        if (!made.has(position)) made.set(position, line(position, first + i));
        const { element } = made.get(position);
        if (before.nextSibling !== element) before.after(element);
        before = element;
      });
      above.firstChild.style.height = `${first * ROW_PX}px`;
      below.firstChild.style.height = `${(order.length - last) * ROW_PX}px`;
      above.hidden = first === 0;
      below.hidden = last === order.length;
      drawTicks();
    };

    const line = (position, place) => {
      const row = rows[position];
      const [name, type, dtype, checkpointed, whyNot] = row;
      const inOrder = column === MODEL_ORDER && matching === null; // else the tree above a name is not in sight
      const parts = name.split(".");
      const box = h("input", {
        type: "checkbox", "aria-label": `checkpoint ${name}`,
        onchange: () => asked.ask({ layer: name, on: box.checked }, { [name]: box.checked }),
      });
      const tick = h("td", { class: "ampw-check" }, ...(position === model.get("whole") ? [] : [box]));
      if (!tick.firstChild) tick.title = whyNot;
      const label = h("span", { class: "ampw-name", style: `padding-left: ${inOrder ? 12 * (parts.length - 1) : 0}px` }, inOrder && !descending ? parts.at(-1) : name);
      const cells = TABLE_COLUMNS.map(([which]) => {
        if (which === "name") return h("th", { scope: "row", title: name }, label);
        if (which === "type") return h("td", { class: "ampw-type", title: type }, type);
        if (which === "dtype") return h("td", { class: "ampw-type" }, dtype);
        const value = valueOf(row, which);
        const exact = value === null ? null : SIZES.has(which) ? `${value.toLocaleString("en")} bytes` : null;
        const text = which === "saves" && checkpointed ? "in force then" : SIZES.has(which) ? sizeText(value) : timeText(value);
        return h("td", { class: "ampw-number", title: exact }, text);
      });
      return { box, whyNot, name, element: h("tr", { "aria-rowindex": place + 2 }, tick, ...cells) };
    };

    const drawTicks = () => {
      const locked = asked.locked();
      for (const [position, { box, whyNot, name, element }] of made) {
        const on = asked.value(name, ticked.has(position));
        box.checked = on;
        const disabled = locked || whyNot !== "";
        if (box.disabled !== disabled) box.disabled = disabled;
        element.classList.toggle("ampw-changed", on !== inForce.has(position));
        const proposes = proposed.has(position);
        element.classList.toggle("ampw-proposed", proposes);
        box.title = whyNot || `Checkpoint ${name}${proposes ? ": proposed, see the report above" : ""}`;
      }
    };

    view.addEventListener("scroll", () => drawRows(), { passive: true });
    const size = new ResizeObserver(() => rows && drawRows());
    size.observe(view);
    lines.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
      const boxes = [...lines.querySelectorAll("input:enabled")];
      const next = boxes[boxes.indexOf(event.target) + step];
      event.preventDefault();
      next?.focus();
      next?.closest("tr").scrollIntoView({ block: "nearest" });
    });

    const draw = () => {
      ticked = new Set(model.get("requested"));
      inForce = new Set(model.get("in_force"));
      proposed = new Set(model.get("proposed"));
      if (rows !== model.get("rows") || matching !== model.get("matching")) {
        const top = view.scrollTop;
        rows = model.get("rows");
        matching = model.get("matching");
        arrange();
        below.firstChild.style.height = `${order.length * ROW_PX}px`; // without rows there would be nothing to be scrolled
        below.hidden = false;
        view.scrollTop = top;
      }
      if (document.activeElement !== filter && filter.value.trim() !== model.get("pattern")) filter.value = model.get("pattern");
      filter.disabled = asked.locked(); // the names are matched in the kernel
      setText(caption, model.get("caption"));
      caption.title = model.get("caption");
      drawRows();
      view.hidden = !order.length;
      el.classList.toggle("ampw-empty", !rows.length);
      setText(nothing, order.length ? "" : rows.length ? `No layer matches ${model.get("pattern")}` : "The layers are listed when a step has been profiled");
      const whole = model.get("whole");
      const layers = rows.length - (whole >= 0);
      const shown = order.length - order.includes(whole);
      setText(summary, !rows.length ? "" : matching ? `${shown} of ${layers} layers` : layers === 1 ? "1 layer" : `${layers} layers`);
      const differs = ticked.size !== inForce.size || [...ticked].some((position) => !inForce.has(position));
      setWaiting(differs || asked.waits());
    };
    const asked = asking(model, el, showLost, draw);
    model.on("change", draw);
    draw();
    return () => {
      clearTimeout(rest);
      size.disconnect();
      remove();
      asked.remove();
    };
  },
};
