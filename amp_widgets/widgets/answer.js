export default {
  render({ model, el }) {
    const words = model.get("words");
    const { body, showLost, remove } = frame(el, words.answer_title, "ampw-answer");
    const waiting = h("p", { class: "ampw-sentence" });
    const said = h("p", { class: "ampw-said" });
    const verdict = h("p", { class: "ampw-far" });
    const why = h("p", {});
    const more = h("p", {});
    const folded = h("details", { class: "ampw-explained" }, h("summary", {}, words.more), more);
    body.append(h("div", { class: "ampw-told", role: "status" }, waiting, said, verdict, why), folded);

    const draw = () => {
      setText(waiting, model.get("waiting"));
      setText(said, model.get("said"));
      setText(verdict, model.get("verdict"));
      verdict.dataset.tone = model.get("tone");
      setText(why, model.get("why"));
      setText(more, model.get("more"));
      folded.hidden = model.get("more") === "";
    };
    const kernel = watchKernel(model, el, showLost);
    model.on("change", draw);
    draw();
    return () => {
      remove();
      kernel.remove();
    };
  },
};
