const MODEL_ORDER = "layer";
const EXPLANATION = say("Autocast decides for every operator anew: matrix products and convolutions get their inputs cast to fp16 or bf16 (the lower-precision list), some operators that need range or precision get theirs cast to fp32 (the fp32 list), a few take the widest of their inputs (the promote list), and all others compute in whatever they are given. Each cast writes a copy. The lists are not the same on a CPU and on CUDA: on a CPU softmax, exp, sum and layer norm are on none. A layer whose numbers need the range of fp32 can be kept in it, ticked on the left, in force from the next step: it then runs with autocast off, on inputs cast to fp32.");
const EXAMPLE = say("In the digits demo: choose bf16, press Start and take the map. The matrix products compute in bf16, each after a cast, and cross_entropy in fp32. Then tick layers.0 and take it again: that layer is all fp32, and autocast casts what follows it. In the text demo tick layers.0.mlp. There layer_norm computes in fp32 though it is on no list: what it is given, a sum, is fp32.");
// [column, heading, what it means, position in a row, whether a number]
const TABLE_COLUMNS = [
  ["layer", say("layer"), say("In the order of the first calls"), 0, false],
  ["operator", say("operator"), say("As it is called in Python; several of torch's operators may be behind it"), 1, false],
  ["in", say("in"), say("The format of what it is called with, before any cast"), 3, false],
  ["compute", say("computes"), say("The format of what it computes with, after the casts"), 4, false],
  ["why", say("why"), say("Why it computes in this format"), 14, false],
  ["out", say("out"), say("The format of what it returns"), 5, false],
  ["casts", say("casts"), say("Casts made for it in the forward pass, and the bytes that they write. A weight is cast once a step"), 8, true],
  ["backward", say("backward"), say("The format of what its part of the backward pass computes with"), 6, false],
  ["backcasts", say("grad casts"), say("Casts of gradients in its part of the backward pass, and the bytes that they write"), 10, true],
  ["calls", say("calls"), say("In the forward pass; recomputes are not counted"), 2, true],
  ["cuda", "CUDA", say("Predicted, not run: the list that autocast has it on for CUDA; lower: the lower-precision list"), 16, false],
];
const FORMATS = new Set(["fp32", "fp16", "bf16", "fp64"]);

/** By which colour a format is told, beside its name. */
function toneOf(format) {
  if (format === "") return "none";
  return FORMATS.has(format) ? format : "mixed";
}

function chip(format) {
  return h("span", { class: "ampw-format", "data-format": toneOf(format) }, format);
}

export default {
  render({ model, el }) {
    const { body, heading, titleId, setWaiting, showLost, remove } = frame(el, say("Number formats by layer and operator"), "ampw-dtypes");
    const summary = h("span", { class: "ampw-dim", role: "status" });
    heading.append(summary);
    const take = h("button", { type: "button", onclick: () => asked.ask({ map: true }, { map: true }) });
    const sentence = h("span", { class: "ampw-difference" });
    const stale = h("p", { class: "ampw-sentence ampw-stale", hidden: true });
    const whyNot = h("p", { class: "ampw-sentence ampw-stale", role: "status", hidden: true });
    const explained = h("details", { class: "ampw-explained", open: true }, h("summary", {}, say("What is shown")), h("p", { class: "ampw-dim" }, EXPLANATION), h("p", { class: "ampw-dim" }, EXAMPLE));

    // the tree
    const treeId = uid();
    const list = h("ul", { "aria-labelledby": treeId });
    const treeView = h("div", {
      class: "ampw-scroll", tabindex: "-1", role: "group", "aria-labelledby": treeId,
      title: say("Keys: arrows go from layer to layer, Space ticks one, Enter shows its operators"),
    }, list);
    const legend = h("div", { class: "ampw-keep" }, h("span", { id: treeId }, say("Keep in FP32")), h("span", { class: "ampw-dim" }, say("the ticked layers")));

    // the table
    const filter = filterField(
      model, (message) => asked.ask(message),
      say("Part of a layer's name, or a pattern: * stands for one part of a dotted name, ** for any number of parts. Several with spaces between."));
    const heads = sortHeads(TABLE_COLUMNS.map(([column, label, title, , number]) => [column, label, title, number]), MODEL_ORDER, false, () => arrange(false));
    const { view, table, lines } = scrolledTable(titleId, ...heads.cells);
    const nothing = h("p", { class: "ampw-sentence", hidden: true });

    const halves = h("div", { class: "ampw-halves" },
      h("div", { class: "ampw-half-tree" }, legend, treeView),
      h("div", { class: "ampw-half-table" }, filter.element, view, nothing));
    body.append(h("div", { class: "ampw-choices" }, take, sentence), whyNot, stale, explained, halves);

    let rows = null;
    let layers = null;
    let matching = null;
    let order = [];
    let ticked = new Set();
    let inForce = new Set();

    const arrange = (keepPlace) => {
      const positions = matching ?? rows.map((_, i) => i);
      const at = TABLE_COLUMNS.find(([name]) => name === heads.column())[3];
      if (heads.column() === MODEL_ORDER) order = heads.descending() ? [...positions].reverse() : positions;
      else order = sortedBy(positions, (i) => rows[i][at], heads.descending());
      heads.draw();
      heads.cell("cuda").hidden = !model.get("predicts");
      table.setAttribute("aria-rowcount", order.length + 1);
      operators.put(order, keepPlace);
    };

    const casts = (count, bytes, again = "") =>
      h("td", { class: "ampw-number", title: count ? say("{count} casts, {bytes} bytes", { count, bytes: bytes.toLocaleString("en") }) + again : null }, count ? `${count} · ${sizeText(bytes)}` : "");

    const operatorRow = (position, place) => {
      const [layer, operator, calls, before, compute, after, backward, count, bytes, backCount, backBytes, againCalls, againCasts, againBytes, why, sentence, cuda] = rows[position];
      const again = againCalls ? say("; once more in recomputes: {casts}, {bytes} bytes", { casts: againCasts, bytes: againBytes.toLocaleString("en") }) : "";
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
    const operators = virtualRows(view, operatorRow, rowSpacer(TABLE_COLUMNS.length));
    lines.append(...operators.ends);

    const layerRow = (position) => {
      const [name, type, formats, whyNot] = layers[position];
      const parts = name.split(".");
      const box = tickBox(name, say("keep {name} in FP32", { name }), asked.ask);
      const button = h("button", {
        type: "button", class: "ampw-name", style: `padding-left: ${12 * (parts.length - 1)}px`,
        onclick: () => filter.set(/[*?[\s,]/.test(name) || !layers.some(([other]) => other.startsWith(`${name}.`)) ? name : `${name}.**`),
      }, parts.at(-1), h("span", { class: "ampw-type-dim" }, type));
      const element = h("li", { class: `ampw-list-row${formats.length ? "" : " ampw-not-called"}` }, box, button, h("span", { class: "ampw-chips" }, ...formats.map(chip)));
      return { element, box, button, name, whyNot, about: type ? `${name} (${type})` : name };
    };
    const drawTicks = () => {
      drawTickBoxes(tree.made, asked, ticked, inForce, (name) => say("Keep {name} in FP32", { name }));
      const why = asked.whyLocked();
      for (const { button, about } of tree.made.values()) {
        setOff(button, why !== "");
        button.title = why ? say("{layer}: its operators cannot be shown: {why}", { layer: about, why }) : say("{layer}: show its operators", { layer: about });
      }
      stop.draw();
    };
    const tree = virtualRows(treeView, layerRow, listSpacer, drawTicks);
    const stop = oneTabStop(treeView, tree, list);
    list.append(...tree.ends);
    list.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.target.type !== "checkbox") return;
      [...tree.made.values()].find(({ box }) => box === event.target)?.button.click();
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
      filter.draw(asked.locked(), asked.whyLocked());
      drawTicks();
      const waits = model.get("pending") || asked.value("map", false);
      setOff(take, asked.locked() || waits || !model.get("available"));
      take.setAttribute("aria-busy", String(waits));
      setText(take, waits ? say("Taking the map at the next step …") : rows.length ? say("Take the map again") : say("Take the map"));
      setText(sentence, model.get("sentence"));
      setText(stale, model.get("stale"));
      setText(whyNot, model.get("why_not"));
      halves.hidden = !rows.length && !layers.length;
      view.hidden = !order.length;
      setText(nothing, order.length ? "" : rows.length ? say("No layer with an operator matches {pattern}", { pattern: model.get("pattern") }) : say("No map was taken yet. What is listed then: every operator of a step, its format and its casts"));
      setText(summary, !rows.length ? "" : matching ? say("{shown} of {count} rows", { shown: order.length, count: rows.length }) : say("{count} rows", { count: rows.length }));
      setWaiting(!sameSets(ticked, inForce) || asked.waits());
    };
    const asked = asking(model, el, showLost, draw);
    model.on("change", draw);
    draw();
    return () => {
      filter.remove();
      operators.remove();
      tree.remove();
      remove();
      asked.remove();
    };
  },
};
