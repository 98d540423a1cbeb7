export default {
  render({ model, el }) {
    const words = model.get("words");
    const { body, setWaiting, showLost, remove } = frame(el, words.measure_title, "ampw-measure");
    const note = h("span", { class: "ampw-dim", id: uid(), role: "status" });
    const run = h("button", { type: "button", class: "ampw-run-it", "aria-describedby": note.id, onclick: () => asked.ask({ run: true }, { run: true }) });
    const bar = h("progress", { max: 1, "aria-label": words.progress });
    const problem = h("p", { class: "ampw-rejection", role: "alert", hidden: true });
    body.append(h("div", { class: "ampw-choices" }, run, note), bar, problem);

    const draw = () => {
      const pending = model.get("pending") || asked.value("run", false);
      setText(run, model.get("again") ? words.again : words.run);
      setOff(run, asked.locked() || pending || !model.get("ready"));
      run.setAttribute("aria-busy", String(pending));
      setText(note, model.get("note"));
      bar.hidden = !pending || asked.locked();
      if (model.get("fraction") > 0 && model.get("fraction") < 1) bar.value = model.get("fraction");
      else bar.removeAttribute("value");
      setText(problem, model.get("problem"));
      setWaiting(false);
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
