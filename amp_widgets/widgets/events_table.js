export default {
  render({ model, el }) {
    const { body, heading, titleId, showLost, remove } = frame(el, say("Events"), "ampw-events");
    const summary = h("span", { class: "ampw-dim", role: "status" });
    heading.append(summary);
    const groupId = uid();
    const group = h("select", { id: groupId, onchange: () => asked.ask({ group: group.value }, { group: group.value }) },
      ...model.get("groups").map(([name, label]) => h("option", { value: name }, label)));
    const heads = [[say("step"), "ampw-number"], [say("event"), ""], [say("what"), ""], [say("by"), ""]];
    const { view, lines } = scrolledTable(titleId, ...heads.map(([name, kind]) => h("th", { scope: "col", class: kind }, name)));
    const nothing = h("p", { class: "ampw-sentence", hidden: true }, say("Nothing of this kind has happened up to this step."));
    body.append(h("span", { class: "ampw-choice" }, h("label", { for: groupId }, say("Show")), group), view, nothing);

    let rows = null;
    const draw = () => {
      if (rows !== model.get("rows")) {
        rows = model.get("rows");
        lines.replaceChildren(...rows.map(([step, kind, reason, who, tone]) => h("tr", { "data-tone": tone || null },
          h("td", { class: "ampw-number" }, h("button", { type: "button", title: say("Go to this step"), onclick: () => asked.ask({ step }) }, step.toLocaleString("en"))),
          h("td", {}, kind), h("td", {}, reason), h("td", { class: "ampw-type" }, who))));
      }
      rows.forEach(([step], i) => lines.children[i].toggleAttribute("data-now", step === model.get("step")));
      for (const button of lines.querySelectorAll("button")) setOff(button, asked.locked());
      group.value = asked.value("group", model.get("group"));
      group.disabled = asked.locked();
      view.hidden = !rows.length;
      nothing.hidden = rows.length > 0;
      setText(summary, model.get("summary"));
    };
    const asked = asking(model, el, showLost, draw);
    model.on("change", draw);
    draw();
    return () => {
      remove();
      asked.remove();
    };
  },
};
