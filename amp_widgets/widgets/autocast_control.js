export default {
  render({ model, el }) {
    const { body, titleId, setWaiting, showLost, remove } = frame(el, say("Autocast"), "ampw-autocast");
    const group = h("div", { class: "ampw-segments", role: "radiogroup", "aria-labelledby": titleId });
    const notes = h("div", { class: "ampw-notes" });
    const name = uid();
    const parts = new Map();
    let built = "";
    body.append(group, notes);

    const build = (options) => {
      group.replaceChildren();
      notes.replaceChildren();
      parts.clear();
      for (const option of options) {
        const noteId = uid();
        const input = h("input", {
          type: "radio", name, value: option.name, disabled: !option.available, "aria-describedby": option.note ? noteId : null,
          onchange: () => asked.ask({ autocast: option.name }, { autocast: option.name }),
        });
        const label = h("label", { class: "ampw-segment", title: option.note || null }, input, h("span", {}, option.name));
        parts.set(option.name, { input, label });
        group.append(label);
        if (option.note) {
          const text = option.available ? option.note : say("not available: {why}", { why: option.note });
          notes.append(h("p", { id: noteId }, h("b", {}, option.name), " ", text));
        }
      }
    };
    const draw = () => {
      const options = model.get("options");
      if (JSON.stringify(options) !== built) {
        built = JSON.stringify(options);
        build(options);
      }
      const inForce = model.get("in_force");
      const shown = asked.value("autocast", model.get("waiting") || inForce);
      const locked = asked.locked();
      for (const option of options) {
        const { input, label } = parts.get(option.name);
        input.checked = option.name === shown;
        input.disabled = locked || !option.available;
        input.parentElement.classList.toggle("ampw-unavailable", !option.available);
        label.classList.toggle("ampw-in-force", option.name === inForce);
      }
      setWaiting(shown !== inForce);
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
