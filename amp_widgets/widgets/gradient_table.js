const GRADIENT_COLUMNS = [
  [say("layer"), say("Whose output the gradients are of, worst first")],
  [say("stored in"), say("The format that the sampled step stored them in")],
  [say("becomes zero"), say("Too small for fp16 at this scale")],
  [say("subnormal"), say("Kept with fewer bits")],
  [say("normal"), say("Kept as well as fp16 can")],
  [say("overflow"), say("Too large for fp16 at this scale: the step would be skipped. Looked for in all gradients, and in those of the layer's parameters, which are named")],
  [say("zero already"), say("Zero when they were counted, and none of the shares on the left")],
  [say("gradients"), say("How many there are. N of M: the shares are from a sample of N, and right to within 1 percentage point")],
];

export default {
  render({ model, el }) {
    const { body, heading, titleId, setWaiting, showLost, remove } = frame(el, say("Gradients by layer"), "ampw-gradient-table");
    const summary = h("span", { class: "ampw-dim", role: "status" });
    heading.append(summary);
    const filter = filterField(
      model, (message) => asked.ask(message),
      say("Part of a name, or a pattern: * stands for one part of a dotted name, ** for any number of parts. Several with spaces between. It also holds for the picture and the shares above"));
    const heads = GRADIENT_COLUMNS.map(([name, title], i) => h("th", { scope: "col", title, class: i > 1 ? "ampw-number" : "" }, name));
    const { view, lines } = scrolledTable(titleId, ...heads);
    const nothing = h("p", { class: "ampw-sentence", hidden: true });
    body.append(filter.element, view, nothing);

    let rows = null;
    const draw = () => {
      if (rows !== model.get("rows")) {
        rows = model.get("rows");
        lines.replaceChildren(...rows.map(([name, dtype, shares, count, lost, nonfinite]) => h("tr", {},
          h("th", { scope: "row", title: name }, name),
          h("td", {}, nonfinite ? `${dtype}, ${nonfinite}` : dtype),
          ...shares.map((share, i) => h("td", { class: `ampw-number${lost[i] ? " ampw-lost" : ""}` }, share)),
          h("td", { class: "ampw-number" }, count))));
      }
      filter.draw(asked.locked(), asked.whyLocked());
      view.hidden = !rows.length;
      el.classList.toggle("ampw-empty", !model.get("sampled"));
      setText(nothing, rows.length ? "" : say("No layer matches {pattern}", { pattern: model.get("pattern") }));
      setText(summary, model.get("summary"));
      setWaiting(asked.waits());
    };
    const asked = asking(model, el, showLost, draw);
    model.on("change", draw);
    draw();
    return () => {
      filter.remove();
      remove();
      asked.remove();
    };
  },
};
