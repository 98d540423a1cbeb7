export default {
  render({ model, el }) {
    const words = model.get("words");
    const { body, setWaiting, showLost, remove } = frame(el, words.question_title, "ampw-question");
    const noteId = uid();
    const problem = h("p", { class: "ampw-rejection", id: uid(), role: "alert", hidden: true });
    const note = h("p", { class: "ampw-sentence", id: noteId, role: "status" });
    const button = h("button", { type: "button", class: "ampw-guess", "aria-describedby": noteId, onclick: () => commit() });

    let typed = null; // what the page was last told
    let read, show, lock, ask; // `ask`: what is asked, in the language in force
    if (model.get("choices").length) {
      const name = uid();
      const radios = model.get("choices").map(() => h("input", { type: "radio", name, id: uid() }));
      const labels = radios.map((radio) => h("label", { for: radio.id }));
      const asks = h("legend", { class: "ampw-asked" });
      body.append(h("fieldset", {}, asks, h("div", { class: "ampw-answers" }, ...radios.map((radio, i) => h("span", { class: "ampw-tick" }, radio, labels[i])))));
      ask = () => {
        setText(asks, model.get("text"));
        model.get("choices").forEach((choice, i) => {
          radios[i].value = choice;
          setText(labels[i], choice);
        });
      };
      read = () => radios.find((radio) => radio.checked)?.value ?? "";
      show = (value) => { for (const radio of radios) radio.checked = radio.value === value; };
      lock = (locked) => { for (const radio of radios) radio.disabled = locked; };
      body.append(h("div", { class: "ampw-choices" }, button));
    } else {
      const id = uid();
      const asks = h("p", { class: "ampw-asked", id: uid() });
      const unit = h("span", { class: "ampw-unit", id: uid() });
      const rule = h("p", { class: "ampw-sentence", id: uid() });
      const input = h("input", {
        type: "text", id, inputmode: "decimal", autocomplete: "off", spellcheck: "false",
        "aria-describedby": `${asks.id} ${unit.id} ${rule.id} ${problem.id}`,
        onkeydown: (event) => {
          if (event.key === "Enter" && !event.shiftKey && !event.ctrlKey && !event.metaKey && !event.altKey) {
            event.preventDefault(); // in a notebook, the browser's own event may never come
            commit();
          }
        },
      });
      read = () => input.value;
      show = (value) => { input.value = value; };
      lock = (locked) => { input.readOnly = locked; };
      ask = () => {
        setText(asks, model.get("text"));
        setText(unit, model.get("unit"));
        setText(rule, model.get("rule"));
      };
      body.append(asks, h("div", { class: "ampw-choices ampw-asking" }, h("label", { for: id }, words.number_label), input, unit, button), rule);
    }
    body.append(problem, note);

    const commit = () => {
      if (isOff(button)) return;
      typed = read();
      asked.ask({ guess: typed });
    };
    const draw = () => {
      const off = asked.locked() || model.get("settled");
      ask();
      if (typed !== model.get("typed") && !asked.waits() && model.get("problem") === "") {
        typed = model.get("typed");
        show(typed);
      }
      lock(off);
      setOff(button, off);
      setText(button, model.get("typed") === "" ? words.guess : words.change);
      button.hidden = model.get("settled") && document.activeElement !== button; // hidden, it would lose the focus
      setText(problem, model.get("problem"));
      setText(note, model.get("note"));
      setWaiting(asked.waits());
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
