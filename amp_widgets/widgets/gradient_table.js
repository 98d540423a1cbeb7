const FILTER_REST_MS = 250;
const GRADIENT_COLUMNS = [
  ["layer", "Whose output the gradients are of, worst first"],
  ["stored in", "The format that the sampled step stored them in"],
  ["become zero", "Too small for fp16 at this scale"],
  ["subnormal", "Kept with fewer bits"],
  ["normal", "Kept as well as fp16 can"],
  ["overflow", "Too large for fp16 at this scale: the step would be skipped"],
  ["zero already", "Zero when they were counted, and none of the shares on the left"],
  ["gradients", "How many there are"],
];

export default {
  render({ model, el }) {
    const { body, heading, titleId, setWaiting, showLost, remove } = frame(el, "Gradients by layer", "ampw-gradient-table");
    const summary = h("span", { class: "ampw-dim", role: "status" });
    heading.append(summary);
    const filterId = uid();
    let rest;
    const applyFilter = () => {
      clearTimeout(rest);
      if (filter.value.trim() !== model.get("pattern")) asked.ask({ filter: filter.value });
    };
    const filter = h("input", {
      type: "text", id: filterId, placeholder: "layers.*.mlp", autocomplete: "off", spellcheck: "false",
      title: "Part of a name, or a pattern: * stands for one part of a dotted name, ** for any number of parts. Several with spaces between. It also holds for the picture and the shares above",
      oninput: () => { clearTimeout(rest); rest = setTimeout(applyFilter, FILTER_REST_MS); },
      onkeydown: (event) => {
        if (event.key === "Escape") filter.value = "";
        if (event.key === "Escape" || (event.key === "Enter" && !event.shiftKey)) applyFilter();
      },
    });
    const lines = h("tbody");
    const head = h("tr", {}, ...GRADIENT_COLUMNS.map(([name, title], i) => h("th", { scope: "col", title, class: i > 1 ? "ampw-number" : "" }, name)));
    const view = h("div", { class: "ampw-scroll", tabindex: "0", role: "region", "aria-labelledby": titleId },
      h("table", { "aria-labelledby": titleId }, h("thead", {}, head), lines));
    const nothing = h("p", { class: "ampw-sentence", hidden: true });
    body.append(h("div", { class: "ampw-pattern" }, h("label", { for: filterId }, "Filter"), filter), view, nothing);

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
      if (document.activeElement !== filter && filter.value.trim() !== model.get("pattern")) filter.value = model.get("pattern");
      filter.disabled = asked.locked();
      view.hidden = !rows.length;
      el.classList.toggle("ampw-empty", !model.get("sampled"));
      setText(nothing, rows.length ? "" : `No layer matches ${model.get("pattern")}`);
      setText(summary, model.get("summary"));
      setWaiting(asked.waits());
    };
    const asked = asking(model, el, showLost, draw);
    model.on("change", draw);
    draw();
    return () => {
      clearTimeout(rest);
      remove();
      asked.remove();
    };
  },
};
