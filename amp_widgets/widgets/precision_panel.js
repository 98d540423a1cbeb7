const WORST = "worst";
const WHAT = [
  ["output", say("output"), say("Relative error of what the layer returns, in {format}")],
  ["gradient", say("gradient"), say("Relative error of the gradient that reaches what it returns, in {format}")],
  ["weights", say("weights"), say("Relative error of the gradients of its own parameters, in {format}")],
];
// Positions in a row of `rows`.
const NAME = 0, TYPE = 1, PLACE = 2, WORST_TEXT = 3, BROKEN = 4, CELLS = 5;
const TEXT_AT = { layer: PLACE, type: TYPE };
const REFERENCES = [["fp32", "fp32"], ["fp64", say("fp64, on a copy of the model")]];

export default {
  render({ model, el }) {
    const { body, heading, titleId, setWaiting, showLost, remove } = frame(el, say("What precision costs"), "ampw-precision");
    const summary = h("span", { class: "ampw-dim", role: "status" });
    heading.append(summary);
    const measure = h("button", { type: "button", onclick: () => asked.ask({ measure: true }, { measure: true }) });
    const referenceId = uid();
    const reference = h("select", {
      id: referenceId, onchange: () => asked.ask({ reference: reference.value }, { reference: reference.value }),
    }, ...REFERENCES.map(([name, text]) => h("option", { value: name }, text)));
    const caption = h("span", { class: "ampw-difference" });
    const noBatch = h("span", { class: "ampw-dim", id: uid(), hidden: true });
    const whyNot = h("p", { class: "ampw-sentence ampw-stale", role: "status", hidden: true });
    const stale = h("p", { class: "ampw-sentence ampw-stale", hidden: true });
    const sentences = h("ul", { class: "ampw-notes" });
    const filter = filterField(
      model, (message) => asked.ask(message),
      say("Part of a layer's name, or a pattern: * stands for one part of a dotted name, ** for any number of parts. Several with spaces between."));
    const scale = h("span", { class: "ampw-dim ampw-scale" }, say("The bars are logarithmic: from 1e-8 to 1, each factor of ten is an eighth of the width"));
    const place = h("div");
    const nothing = h("p", { class: "ampw-sentence", hidden: true });
    const line = h("div", { class: "ampw-choices" }, filter.element, scale);
    body.append(
      h("details", { class: "ampw-explained", open: true }, h("summary", {}, say("What is measured")),
        h("p", {}, model.get("explanation")), h("p", {}, model.get("example"))),
      h("div", { class: "ampw-choices" }, measure, h("span", { class: "ampw-choice" }, h("label", { for: referenceId }, say("compared with")), reference), caption),
      noBatch, whyNot, stale, sentences, line, place, nothing);

    let rows = null;
    let formats = null;
    let matching = null;
    let order = [];
    let table = null; // of these formats
    let ticked = new Set();
    let inForce = new Set();

    const makeTable = () => {
      table?.shown.remove();
      const columns = [["layer", say("layer"), say("In the order of the model"), false], ["type", say("type"), say("The class of the layer"), false], [WORST, say("worst"), say("The largest of its errors; first of all come layers with inf or NaN"), true]];
      for (const format of formats) for (const [what, word, meaning] of WHAT) columns.push([`${format} ${what}`, label(format, word), say(meaning, { format }), true]);
      const heads = sortHeads(columns, WORST, true, () => arrange(false));
      const check = h("th", { scope: "col", class: "ampw-check" }, h("span", { class: "ampw-dim", title: say("Keep in FP32") }, "FP32"));
      const made = scrolledTable(titleId, check, ...heads.cells);
      const shown = virtualRows(made.view, layerRow, rowSpacer(columns.length + 1), () => drawTicks());
      made.lines.append(...shown.ends);
      place.replaceChildren(made.view);
      table = { ...made, heads, shown, stop: oneTabStop(made.view, shown, made.lines) };
    };
    const label = (format, what) => h("span", { class: "ampw-two" }, h("span", {}, format, " "), what);

    const arrange = (keepPlace) => {
      const { heads, shown } = table;
      const positions = matching ?? rows.map((_, i) => i);
      const column = heads.column();
      if (column === WORST) order = heads.descending() ? positions : [...positions].reverse(); // as they came
      else {
        const at = formats.flatMap((format) => WHAT.map(([what]) => `${format} ${what}`)).indexOf(column);
        const valueOf = at < 0 ? (i) => rows[i][TEXT_AT[column]] : (i) => rows[i][CELLS][at][0];
        order = sortedBy(positions, valueOf, heads.descending());
      }
      heads.draw();
      table.table.setAttribute("aria-rowcount", order.length + 1);
      shown.put(order, keepPlace);
    };

    const layerRow = (position, at) => {
      const row = rows[position];
      const name = row[NAME];
      const whyNot = model.get("reasons")[position];
      const box = tickBox(name, say("keep {name} in FP32", { name }), asked.ask);
      const cells = row[CELLS].map(([, text, length], i) => {
        const start = i % WHAT.length === 0 ? " ampw-group" : "";
        return h("td", { class: `ampw-number ampw-error-bar${start}`, "data-format": formats[Math.floor(i / WHAT.length)], style: `--ampw-length: ${length}%` }, text);
      });
      const element = h("tr", { "aria-rowindex": at + 2, class: row[BROKEN] ? "ampw-broken" : null },
        h("td", { class: "ampw-check", title: whyNot || null }, ...(whyNot ? [] : [box])),
        h("th", { scope: "row", title: name }, h("span", { class: "ampw-name" }, name)),
        h("td", { class: "ampw-type", title: row[TYPE] }, row[TYPE]),
        h("td", { class: "ampw-number ampw-worst", title: row[BROKEN] || null }, row[WORST_TEXT]), ...cells);
      return { element, box, name, whyNot };
    };
    const drawTicks = () => {
      drawTickBoxes(table.shown.made, asked, ticked, inForce, (name) => say("Keep {name} in FP32", { name }));
      table.stop.draw();
    };

    const draw = () => {
      const locked = asked.locked();
      ticked = new Set(model.get("requested"));
      inForce = new Set(model.get("in_force"));
      const newFormats = JSON.stringify(formats) !== JSON.stringify(model.get("formats"));
      if (newFormats || rows !== model.get("rows") || matching !== model.get("matching")) {
        [rows, formats, matching] = [model.get("rows"), model.get("formats"), model.get("matching")];
        if (newFormats) makeTable();
        arrange(!newFormats);
      }
      drawTicks();
      filter.draw(locked, asked.whyLocked());
      line.hidden = !rows.length;
      place.hidden = !order.length;
      setText(nothing, order.length ? "" : rows.length ? say("No layer matches {pattern}", { pattern: model.get("pattern") }) : say("Nothing was measured yet. What is listed then: every layer, and how far it is off in each format"));
      setText(summary, !rows.length ? "" : matching ? say("{shown} of {count} layers", { shown: order.length, count: rows.length }) : say("{count} layers", { count: rows.length }));
      const waits = model.get("pending") || asked.value("measure", false);
      setText(measure, waits ? say("Measuring at the next step …") : rows.length ? say("Measure precision again") : say("Measure precision"));
      measure.setAttribute("aria-busy", String(waits));
      setOff(measure, locked || waits || model.get("why_no_batch") !== "");
      setText(noBatch, model.get("why_no_batch"));
      if (noBatch.hidden) measure.removeAttribute("aria-describedby");
      else measure.setAttribute("aria-describedby", noBatch.id);
      reference.value = asked.value("reference", model.get("reference"));
      reference.disabled = locked;
      setText(caption, model.get("caption"));
      setText(whyNot, model.get("why_not"));
      setText(stale, model.get("stale"));
      const texts = model.get("sentences");
      if (sentences.dataset.drawn !== JSON.stringify(texts)) {
        sentences.dataset.drawn = JSON.stringify(texts);
        sentences.replaceChildren(...texts.map((text) => h("li", {}, text)));
      }
      setWaiting(!sameSets(ticked, inForce) || asked.waits());
    };
    const asked = asking(model, el, showLost, draw);
    model.on("change", draw);
    draw();
    return () => {
      filter.remove();
      table.shown.remove();
      remove();
      asked.remove();
    };
  },
};
