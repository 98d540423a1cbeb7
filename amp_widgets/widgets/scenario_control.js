export default {
  render({ model, el }) {
    const words = model.get("words");
    const { body, setWaiting, showLost, remove } = frame(el, words.situation_title, "ampw-situation");
    const id = uid();
    const list = h("select", { id, onchange: () => asked.ask({ choose: list.value }, { choose: list.value }) },
      ...model.get("titles").map(([name, title]) => h("option", { value: name }, title)));
    const situation = h("p", { class: "ampw-about" });
    const watch = h("p", { class: "ampw-sentence" });
    body.append(h("div", { class: "ampw-choice" }, h("label", { for: id }, words.choose), list), h("div", { class: "ampw-told-before", "aria-live": "polite" }, situation, watch));

    const draw = () => {
      list.value = asked.value("choose", model.get("chosen"));
      list.disabled = asked.locked();
      setText(situation, model.get("situation"));
      setText(watch, model.get("watch"));
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
