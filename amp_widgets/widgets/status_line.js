const LOST_SENTENCE = say("The kernel of this dashboard was restarted or has ended. To have it live, run this cell again, after the cells that it needs.");

export default {
  render({ model, el }) {
    el.classList.add("ampw");
    const word = h("span", { class: "ampw-word", role: "status" });
    const numbers = h("div", { class: "ampw-numbers" });
    const machine = h("span", { class: "ampw-machine" });
    const label = h("span", { class: "ampw-dim" });
    const inForce = h("span", {});
    const waiting = h("span", { class: "ampw-chip", role: "status" });
    const rejection = h("p", { class: "ampw-rejection", role: "alert" });
    const complaint = h("p", { class: "ampw-rejection ampw-complaint", role: "alert" });
    const error = h("pre", { class: "ampw-error", role: "alert", tabindex: "0", "aria-label": say("Error") });
    const notes = h("ul", { class: "ampw-notes" });
    const cells = [];
    el.append(h("section", { class: "ampw-status", "aria-label": say("Status") },
      h("div", { class: "ampw-top" }, word, numbers),
      h("div", { class: "ampw-line" }, label, inForce, waiting, machine),
      rejection, complaint, error, notes));

    const draw = () => {
      setText(word, kernel.lost() ? say("no kernel") : model.get("word"));
      word.dataset.tone = kernel.lost() ? "idle" : model.get("tone");
      for (const [i, [label, value, small, title]] of model.get("numbers").entries()) {
        if (!cells[i]) {
          cells[i] = { label: h("span", { class: "ampw-label" }), value: h("span", { class: "ampw-value" }), small: h("span", { class: "ampw-label" }) };
          cells[i].box = h("div", {}, cells[i].label, cells[i].value, cells[i].small);
          numbers.append(cells[i].box);
        }
        cells[i].box.title = title ?? "";
        setText(cells[i].label, label);
        setText(cells[i].value, value);
        setText(cells[i].small, small);
        cells[i].small.hidden = false; // keeps its line, so that nothing moves when it comes
      }
      setText(machine, model.get("machine"));
      setText(label, model.get("in_force_label"));
      inForce.classList.toggle("ampw-dim", model.get("locked") || kernel.lost());
      setText(inForce, model.get("in_force"));
      const waits = model.get("waiting");
      setText(waiting, waits && say("waiting for the next step: {changes}", { changes: waits }));
      const reason = model.get("rejection");
      setText(rejection, reason && say("Rejected: {why}", { why: reason }));
      setText(complaint, model.get("complaint"));
      setText(error, model.get("error"));
      const sentences = kernel.lost() ? [LOST_SENTENCE, ...model.get("notes")] : model.get("notes");
      if (JSON.stringify(sentences) !== notes.dataset.drawn) {
        notes.dataset.drawn = JSON.stringify(sentences);
        notes.replaceChildren(...sentences.map((sentence) => h("li", {}, sentence)));
        notes.hidden = sentences.length === 0;
      }
    };
    const kernel = watchKernel(model, el, draw);
    let probe = 0;
    model.on("comm_live_update", () => { // ipywidgets, when the kernel restarts, but also when only the network is gone for a while
      clearTimeout(probe);
      probe = setTimeout(() => kernel.send({ view, open: true }), 500);
    });
    // JupyterLab's own word on its kernel, where there is one: a kernel that is shut down or dies sends nothing to its widgets.
    const connection = model.get("layout")?.widget_manager?.kernel;
    const takeStatus = (_, status) => ["restarting", "autorestarting", "dead"].includes(status) && kernel.lose();
    connection?.statusChanged?.connect(takeStatus);
    connection?.disposed?.connect(kernel.lose);
    model.on("change", draw);
    draw();

    const hidden = `.${CSS.escape(model.get("still"))}`; // the picture of this dashboard that the notebook keeps
    const hiding = h("style", {}, `${hidden}, .jp-OutputArea-child:has(${hidden}) { display: none !important; }`);
    if (model.get("still")) document.head.append(hiding);

    const view = uid(); // Python redraws only while somebody looks
    kernel.send({ view, open: true });
    const letGoOfKeys = keepKeys(el); // a long error is scrolled with the arrows
    return () => {
      letGoOfKeys();
      clearTimeout(probe);
      hiding.remove();
      connection?.statusChanged?.disconnect(takeStatus);
      connection?.disposed?.disconnect(kernel.lose);
      kernel.send({ view, open: false });
      kernel.remove();
    };
  },
};
