const MODEL_ORDER = "name";
const NUMBERS_FROM = 5; // in a row of `rows`
const TABLE_COLUMNS = [
  ["name", say("layer"), say("In the order of the model; names are indented by depth")],
  ["type", say("type"), say("The class of the layer")],
  ["parameters", say("parameter bytes"), say("Bytes of the parameters of the layer and of those within it; how many they are, see the tree of layers")],
  ["held", say("held"), say("Activations made in the layer that stay in memory from its forward to its backward pass; neither parameters nor optimizer state")],
  ["output", say("output"), say("What its last call returned")],
  ["forward", say("forward"), say("Time of its forward pass, measured in this step alone. session.layer_profile() gives layers that are alike the median of theirs")],
  ["backward", say("backward"), say("Time of its backward pass, measured in this step alone. session.layer_profile() gives layers that are alike the median of theirs")],
  ["saves", say("≈ saves"), say("An estimate, not measured: about what checkpointing it would free from forward to backward: held minus output. The peak of the step falls by less where it is reached elsewhere; what would have been free when memory ran out is in the report")],
  ["costs", say("≈ costs"), say("An estimate: what checkpointing it would cost in each step is its forward pass once more. Where it is in force: how long it was computed again, measured")],
  ["dtype", say("dtype"), say("The format that it computes in")],
];
const SIZES = new Set(["parameters", "held", "output", "saves"]);
const TIMES = new Set(["forward", "backward", "costs"]);
const TEXT_AT = { name: 0, type: 1, dtype: 2 };
const NUMBER_AT = { parameters: 0, held: 1, output: 2, forward: 3, backward: 4, saves: 5, costs: 6 };

// As seconds_text in text.py.
function timeText(seconds) {
  if (seconds === null) return "–";
  if (seconds * 1e6 < 999.5) return `${threeDigits(seconds * 1e6)} µs`;
  if (seconds * 1e3 < 999.5) return `${threeDigits(seconds * 1e3)} ms`;
  return `${threeDigits(seconds)} s`;
}

function valueOf(row, column) {
  return column in TEXT_AT ? row[TEXT_AT[column]] : row[NUMBERS_FROM + NUMBER_AT[column]];
}

/** Positions of rows in order, the model itself first. */
function sorted(rows, positions, column, descending, whole) {
  if (positions.includes(whole)) return [whole, ...sorted(rows, positions.filter((i) => i !== whole), column, descending, -1)];
  if (column === MODEL_ORDER) return descending ? [...positions].reverse() : positions;
  return sortedBy(positions, (i) => valueOf(rows[i], column), descending);
}

export default {
  render({ model, el }) {
    const { body, heading, titleId, setWaiting, showLost, remove } = frame(el, say("Memory and time by layer"), "ampw-layer-table");
    const summary = h("span", { class: "ampw-dim ampw-total", role: "status" });
    const caption = h("span", { class: "ampw-dim ampw-caption", hidden: true });
    heading.append(caption, summary);
    const filter = filterField(
      model, (message) => asked.ask(message),
      say("Part of a name, or a pattern: * stands for one part of a dotted name, ** for any number of parts. Several with spaces between."));
    const heads = sortHeads(TABLE_COLUMNS.map(([name, label, title]) => [name, label, title, name in NUMBER_AT]), MODEL_ORDER, false, () => arrange(false));
    const check = h("th", { scope: "col", class: "ampw-check" }, h("span", { class: "ampw-dim", title: say("Checkpointed") }, say("ckpt")));
    const { view, table, lines } = scrolledTable(titleId, check, ...heads.cells);
    const nothing = h("p", { class: "ampw-sentence", hidden: true });
    body.append(filter.element, view, nothing);

    let rows = null;
    let matching = null;
    let order = [];
    let ticked = new Set();
    let inForce = new Set();
    let proposed = new Set();

    const arrange = (keepPlace) => {
      order = sorted(rows, matching ?? rows.map((_, i) => i), heads.column(), heads.descending(), model.get("whole"));
      heads.draw();
      table.setAttribute("aria-rowcount", order.length + 1);
      shown.put(order, keepPlace);
    };

    const line = (position, place) => {
      const row = rows[position];
      const [name, type, dtype, checkpointed, whyNot] = row;
      const inOrder = heads.column() === MODEL_ORDER && matching === null; // else the tree above a name is not in sight
      const parts = name.split(".");
      const box = tickBox(name, say("checkpoint {name}", { name }), asked.ask);
      const tick = h("td", { class: "ampw-check" }, ...(position === model.get("whole") ? [] : [box]));
      if (!tick.firstChild) tick.title = whyNot;
      const label = h("span", { class: "ampw-name", style: `padding-left: ${inOrder ? 12 * (parts.length - 1) : 0}px` }, inOrder && !heads.descending() ? parts.at(-1) : name);
      const cells = TABLE_COLUMNS.map(([which]) => {
        if (which === "name") return h("th", { scope: "row", title: name }, label);
        if (which === "type") return h("td", { class: "ampw-type", title: type }, type);
        if (which === "dtype") return h("td", { class: "ampw-type" }, dtype);
        const value = valueOf(row, which);
        const exact = value === null ? null : SIZES.has(which) ? say("{count} bytes", { count: value.toLocaleString("en") }) : null;
        const text = which === "saves" && checkpointed ? say("in force then") : SIZES.has(which) ? sizeText(value) : timeText(value);
        return h("td", { class: "ampw-number", title: exact }, text);
      });
      return { box, whyNot, name, element: h("tr", { "aria-rowindex": place + 2 }, tick, ...cells) };
    };

    const drawTicks = () => {
      const marked = (position) => (proposed.has(position) ? say(": proposed, see the report above") : "");
      drawTickBoxes(shown.made, asked, ticked, inForce, (name, position) => say("Checkpoint {name}", { name }) + marked(position));
      for (const [position, { element }] of shown.made) element.classList.toggle("ampw-proposed", proposed.has(position));
      stop.draw();
    };
    const shown = virtualRows(view, line, rowSpacer(TABLE_COLUMNS.length + 1), drawTicks);
    lines.append(...shown.ends);
    const stop = oneTabStop(view, shown, lines);

    const draw = () => {
      ticked = new Set(model.get("requested"));
      inForce = new Set(model.get("in_force"));
      proposed = new Set(model.get("proposed"));
      if (rows !== model.get("rows") || matching !== model.get("matching")) {
        rows = model.get("rows");
        matching = model.get("matching");
        arrange(true);
      }
      filter.draw(asked.locked(), asked.whyLocked());
      setText(caption, model.get("caption"));
      caption.title = model.get("caption");
      shown.draw();
      view.hidden = !order.length;
      el.classList.toggle("ampw-empty", !rows.length);
      setText(nothing, order.length ? "" : rows.length ? say("No layer matches {pattern}", { pattern: model.get("pattern") }) : say("The layers are listed when a step has been profiled"));
      const whole = model.get("whole");
      const layers = rows.length - (whole >= 0);
      const listed = order.length - order.includes(whole);
      setText(summary, !rows.length ? "" : matching ? say("{shown} of {count} layers", { shown: listed, count: layers }) : layers === 1 ? say("1 layer") : say("{count} layers", { count: layers }));
      setWaiting(!sameSets(ticked, inForce) || asked.waits());
    };
    const asked = asking(model, el, showLost, draw);
    model.on("change", draw);
    draw();
    return () => {
      filter.remove();
      shown.remove();
      remove();
      asked.remove();
    };
  },
};
