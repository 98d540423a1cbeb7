// Prepended, after page.js, to the controls that show many rows: only those in sight are in the page.

const ROW_PX = 24; // as in virtual_table.css
const VIEW_PX = 384; // the user can make it higher
const HEAD_PX = 30; // at least as much as the headings of a table, which lie over the rows
const ROWS_AROUND = 12; // beyond what is in sight
const FILTER_REST_MS = 250;

/** As bytes_text in text.py. */
function sizeText(bytes) {
  if (bytes === null) return "–";
  if (bytes < 1000) return `${bytes.toFixed(0)} B`;
  let unit = 0;
  for (bytes /= 1000; bytes >= 999.5 && unit < 3; bytes /= 1000) unit++;
  return `${threeDigits(bytes)} ${["kB", "MB", "GB", "TB"][unit]}`;
}

function threeDigits(value) {
  if (Math.abs(value) >= 99.95) return Math.round(value).toLocaleString("en");
  return value.toFixed(Math.abs(value) >= 9.995 ? 1 : 2);
}

/**
 * A field that filters by names: the kernel is asked with `ask({ filter: text })` when the typing rests or ends, and what is in
 * force is in the trait `pattern`.
 */
function filterField(model, ask, title) {
  const id = uid();
  let rest = 0;
  const apply = () => {
    clearTimeout(rest);
    if (input.value.trim() !== model.get("pattern")) ask({ filter: input.value });
  };
  const input = h("input", {
    type: "text", id, placeholder: "layers.*.mlp", autocomplete: "off", spellcheck: "false", title,
    oninput: () => { clearTimeout(rest); rest = setTimeout(apply, FILTER_REST_MS); },
    onkeydown: (event) => {
      if (event.key === "Escape") input.value = "";
      if (event.key === "Escape" || (event.key === "Enter" && !event.shiftKey)) apply();
    },
  });
  return {
    element: h("div", { class: "ampw-pattern" }, h("label", { for: id }, say("Filter")), input),
    set(text) {
      input.value = text;
      apply();
    },
    draw(locked, whyLocked = "") {
      if (document.activeElement !== input && input.value.trim() !== model.get("pattern")) input.value = model.get("pattern");
      input.disabled = locked; // the names are matched in the kernel
      input.title = whyLocked ? say("Names are matched in the kernel: {why}", { why: whyLocked }) : title;
    },
    remove: () => clearTimeout(rest),
  };
}

/** Headings by which a table is sorted. `columns`: [column, label, title, whether numbers, which are sorted from the largest]. */
function sortHeads(columns, column, descending, arrange) {
  const heads = new Map();
  for (const [name, label, title, numbers] of columns) {
    const arrow = h("span", { class: "ampw-arrow", "aria-hidden": "true" });
    const choose = () => {
      if (name === column) descending = !descending;
      else [column, descending] = [name, numbers];
      arrange();
    };
    const button = h("button", { type: "button", title, onclick: choose }, label, arrow);
    heads.set(name, { arrow, cell: h("th", { scope: "col", class: numbers ? "ampw-number" : "", "aria-sort": "none" }, button) });
  }
  return {
    cells: [...heads.values()].map(({ cell }) => cell),
    cell: (name) => heads.get(name).cell,
    column: () => column,
    descending: () => descending,
    draw() {
      for (const [name, { cell, arrow }] of heads) {
        const here = name === column;
        cell.setAttribute("aria-sort", here ? (descending ? "descending" : "ascending") : "none");
        arrow.textContent = here ? (descending ? "▼" : "▲") : "";
      }
    },
  };
}

/** Positions sorted by a value each; what is not known, null, comes last either way. */
function sortedBy(positions, valueOf, descending) {
  const sign = descending ? -1 : 1;
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  return [...positions].sort((i, j) => {
    const [a, b] = [valueOf(i), valueOf(j)];
    if (a === null || b === null) return (a === null) - (b === null) || i - j;
    return sign * compare(a, b) || i - j;
  });
}

/**
 * Rows of one height in a scrolled view, of which only those in sight and some around are in the page. `make(position, place)`
 * gives an object with the `element`; `drawn` is called whenever rows may have come.
 */
function virtualRows(view, make, spacer, drawn = () => {}) {
  let order = [];
  const made = new Map(); // position → its row
  const [above, below] = [spacer(), spacer()];
  const draw = () => {
    const first = Math.max(0, Math.floor(view.scrollTop / ROW_PX) - ROWS_AROUND);
    const last = Math.min(order.length, Math.ceil((view.scrollTop + Math.max(view.clientHeight, VIEW_PX)) / ROW_PX) + ROWS_AROUND);
    const wanted = order.slice(first, last);
    const keep = new Set(wanted);
    for (const [position, { element }] of made) {
      if (keep.has(position)) continue;
      if (element.contains(document.activeElement)) view.focus({ preventScroll: true });
      element.remove();
      made.delete(position);
    }
    let before = above.element;
    wanted.forEach((position, i) => {
      if (!made.has(position)) made.set(position, { ...make(position, first + i), place: first + i });
      const { element } = made.get(position);
      if (before.nextSibling !== element) before.after(element);
      before = element;
    });
    above.setHeight(first * ROW_PX);
    below.setHeight(Math.max(0, order.length - last) * ROW_PX);
    drawn();
  };
  view.addEventListener("scroll", draw, { passive: true });
  const size = new ResizeObserver(draw);
  size.observe(view);
  return {
    ends: [above.element, below.element],
    made,
    order: () => order,
    firstInSight: () => Math.ceil(view.scrollTop / ROW_PX),
    draw,
    /** Scroll so far that the row at this place is in sight, and so in the page. */
    bring(place) {
      const top = place * ROW_PX;
      const room = Math.max(view.clientHeight, VIEW_PX) - HEAD_PX - ROW_PX;
      if (top < view.scrollTop || top > view.scrollTop + room) {
        view.scrollTop = top < view.scrollTop ? top : top - room;
        draw();
      }
    },
    put(positions, keepPlace) {
      const top = keepPlace ? view.scrollTop : 0;
      for (const { element } of made.values()) element.remove();
      made.clear();
      order = positions;
      below.setHeight(order.length * ROW_PX); // without rows there would be nothing to be scrolled
      view.scrollTop = top;
      draw();
    },
    remove: () => size.disconnect(),
  };
}

function rowSpacer(columns) {
  return () => {
    const cell = h("td", { colspan: columns });
    const element = h("tr", { "aria-hidden": "true" }, cell);
    return { element, setHeight: (px) => { cell.style.height = `${px}px`; element.hidden = px === 0; } };
  };
}

function listSpacer() {
  const element = h("li", { "aria-hidden": "true" });
  return { element, setHeight: (px) => { element.style.height = `${px}px`; element.hidden = px === 0; } };
}

/** A table in a view that scrolls. */
function scrolledTable(titleId, ...heads) {
  const lines = h("tbody");
  const table = h("table", { "aria-labelledby": titleId }, h("thead", {}, h("tr", {}, ...heads)), lines);
  const view = h("div", { class: "ampw-scroll", tabindex: "0", role: "group", "aria-labelledby": titleId }, table);
  const hint = () => {
    view.toggleAttribute("data-more", view.scrollWidth - view.clientWidth - view.scrollLeft > 2); // columns on the right
    view.style.setProperty("--ampw-bar", `${view.offsetWidth - view.clientWidth}px`);
  };
  view.addEventListener("scroll", hint, { passive: true });
  const size = new ResizeObserver(hint); // it goes with what it looks at
  for (const one of [view, table]) size.observe(one);
  return { view, table, lines };
}

/** A box for a layer, that asks for it to be switched on or off. */
function tickBox(name, label, ask) {
  const box = h("input", { type: "checkbox", "aria-label": label, onchange: () => ask({ layer: name, on: box.checked }, { [name]: box.checked }) });
  return box;
}

/** Set the boxes in sight; a layer is underlined where what is ticked is not what is in force. */
function drawTickBoxes(made, asked, requested, inForce, titleOf) {
  const locked = asked.locked();
  for (const [position, { box, name, whyNot, element }] of made) {
    box.checked = asked.value(name, requested.has(position));
    const disabled = locked || whyNot !== "";
    if (box.disabled !== disabled) box.disabled = disabled;
    box.title = whyNot || titleOf(name, position);
    element.classList.toggle("ampw-changed", box.checked !== inForce.has(position));
  }
}

/**
 * One tab stop for all rows instead of one each; the arrow keys, Home and End go from row to row, also to those that are not in the
 * page yet. What takes the focus in a row is its box, or where it cannot be ticked its `button`, if it has one. To be drawn when
 * rows have come or boxes were switched off.
 */
function oneTabStop(view, shown, lines) {
  let place = null; // the position of the row that takes part in the tab order
  const stopOf = (row) => (row?.box.isConnected && !row.box.disabled ? row.box : row?.button ?? null);
  const draw = () => {
    const { made } = shown;
    if (stopOf(made.get(place)) === null) {
      const usable = shown.order().filter((position) => stopOf(made.get(position)) !== null);
      place = usable.find((position) => made.get(position).place >= shown.firstInSight()) ?? usable[0] ?? null;
    }
    for (const [position, row] of made) {
      const stop = position === place ? stopOf(row) : null;
      for (const one of [row.box, row.button]) if (one) one.tabIndex = one === stop ? 0 : -1;
    }
  };
  const positionOf = (element) => [...shown.made].find(([, row]) => row.element.contains(element))?.[0];
  lines.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const order = shown.order();
    const at = order.indexOf(positionOf(event.target));
    const [from, step] = { ArrowDown: [at + 1, 1], ArrowUp: [at - 1, -1], Home: [0, 1], End: [order.length - 1, -1] }[event.key] ?? [];
    if (at < 0 || !step) return;
    event.preventDefault();
    const top = view.scrollTop;
    for (let next = from; next in order; next += step) {
      shown.bring(next);
      const stop = stopOf(shown.made.get(order[next]));
      if (stop === null) continue;
      place = order[next];
      draw();
      stop.focus({ preventScroll: true });
      return;
    }
    view.scrollTop = top; // there is none
  });
  lines.addEventListener("focusin", (event) => {
    const position = positionOf(event.target);
    if (position === undefined || position === place) return;
    place = position;
    draw();
  });
  return { draw };
}

function sameSets(one, other) {
  return one.size === other.size && [...one].every((value) => other.has(value));
}
