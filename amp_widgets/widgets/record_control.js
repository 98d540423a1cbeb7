export default {
  render({ model, el }) {
    const { body, showLost, remove } = frame(el, say("Recording"), "ampw-record");
    const fieldId = uid();
    const field = h("input", {
      type: "text", id: fieldId, autocomplete: "off", spellcheck: "false",
      title: say("Name of a new file, in the folder of the notebook where none is named. A file that exists is never overwritten"),
      onkeydown: (event) => {
        if (event.key !== "Enter" || event.shiftKey || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        record();
      },
    });
    let pressed = null; // a second press for the same file, until the first is answered, was meant for what is no more
    const record = () => {
      if (asked.locked() || (asked.waits() && pressed === field.value)) return;
      pressed = field.value;
      asked.ask({ record: pressed });
    };
    const button = h("button", { type: "button", title: say("Write the run to this file as it happens, from its first step on"), onclick: record },
      h("span", { class: "ampw-red", "aria-hidden": "true" }), h("span", {}, say("Record")));
    const choose = h("div", { class: "ampw-pattern" }, h("label", { for: fieldId }, say("File")), field, button);
    const stop = h("button", { type: "button", title: say("Write what is left, and let go of the file"), onclick: () => asked.ask({ stop: true }) }, say("Stop recording"));
    const where = h("span", { class: "ampw-where", role: "status" });
    const dot = h("span", { class: "ampw-red", "aria-hidden": "true" });
    const how = h("p", { class: "ampw-sentence" }, say("To see it again:"), " ", h("code", {}, ""));
    body.append(choose, h("div", { class: "ampw-choices" }, h("span", { class: "ampw-choice" }, dot, where), stop), how);

    let offered = null;
    let was = false;
    const draw = () => {
      const locked = asked.locked();
      const on = model.get("recording");
      if (offered !== model.get("offered")) {
        if (["", offered].includes(field.value.trim())) field.value = model.get("offered"); // what was typed stays
        offered = model.get("offered");
      }
      if (on && !was) field.value = offered; // what was typed is a file by now
      was = on;
      choose.hidden = on || locked;
      field.disabled = locked;
      setOff(button, locked);
      stop.hidden = !on || locked;
      dot.hidden = !on;
      setText(where, model.get("sentence"));
      where.title = model.get("title");
      how.hidden = on || model.get("sentence") === "";
      setText(how.lastChild, `%amp replay ${quoted(model.get("title"))}`);
      el.classList.toggle("ampw-empty", locked && model.get("sentence") === "");
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

/** As a shell takes it. */
function quoted(path) {
  return /^[\w./-]+$/.test(path) ? path : `'${path.replaceAll("'", `'"'"'`)}'`;
}
