// Beside page.js and line_sample.js.

export default {
  render({ model, el }) {
    const { body, titleId, remove } = frame(el, say("Differences"), "ampw-runs-table");
    const whyNot = h("p", { class: "ampw-sentence ampw-stale", role: "status", hidden: true });
    const head = h("thead", {});
    const differing = h("tbody", {});
    const fold = h("button", { type: "button", "aria-expanded": "false", onclick: () => { open = !open; draw(); } });
    const foldCell = h("th", { scope: "colgroup" }, fold);
    const folded = h("tbody", {}, h("tr", {}, foldCell));
    const equal = h("tbody", { class: "ampw-equal" });
    const obtained = h("p", {});
    body.append(whyNot,
      h("div", { class: "ampw-sideways", tabindex: "0", role: "group", "aria-labelledby": titleId },
        h("table", { "aria-labelledby": titleId }, head, differing, folded, equal)),
      h("details", { class: "ampw-explained" }, h("summary", {}, say("How the numbers were obtained")), obtained));
    let open = false;
    let drawn = "";

    const line = ([name, ...texts]) => h("tr", {}, h("th", { scope: "row" }, name), ...texts.map((text) => h("td", {}, text)));
    const draw = () => {
      setText(whyNot, model.get("why_not"));
      setText(obtained, model.get("obtained"));
      const data = JSON.stringify([model.get("runs"), model.get("differing"), model.get("equal")]);
      if (data !== drawn) {
        drawn = data;
        head.replaceChildren(h("tr", {}, h("td", {}),
          ...model.get("runs").map((run) => h("th", { scope: "col" }, lineSample(run), h("span", {}, run.name)))));
        differing.replaceChildren(...model.get("differing").map(line));
        equal.replaceChildren(...model.get("equal").map(line));
        foldCell.colSpan = model.get("runs").length + 1;
      }
      setText(fold, model.get("equal_text"));
      folded.hidden = fold.hidden;
      fold.setAttribute("aria-expanded", String(open));
      equal.hidden = !open;
    };
    model.on("change", draw);
    draw();
    return remove;
  },
};
