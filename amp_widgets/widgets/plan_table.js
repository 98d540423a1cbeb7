export default {
  render({ model, el }) {
    const { body, heading, titleId, setWaiting, showLost, remove } = frame(el, model.get("title"), `ampw-plan ampw-plan-${model.get("name")}`);
    const summary = h("span", { class: "ampw-dim" });
    heading.append(summary);
    const noBatchId = uid();
    const ask = h("button", { type: "button", "aria-describedby": noBatchId, onclick: () => asked.ask({ ask: true }, { ask: true }) });
    const confirm = h("button", { type: "button", onclick: () => asked.ask({ confirm: true }, { ask: true }) });
    const noBatch = h("span", { class: "ampw-dim", id: noBatchId, hidden: true });
    const bar = h("div", {});
    const track = h("div", { class: "ampw-plan-track", role: "progressbar", "aria-label": model.get("title"), "aria-valuemin": 0, "aria-valuemax": 100 }, bar);
    const doing = h("span", {});
    const cancel = h("button", { type: "button", onclick: () => asked.ask({ cancel: true }, { cancel: true }) }, say("Cancel"));
    const progress = h("div", { class: "ampw-plan-progress", hidden: true }, h("div", {}, doing, track), cancel);
    const whyNot = h("p", { class: "ampw-sentence ampw-stale", role: "status", hidden: true });
    const table = h("div", { class: "ampw-plan-scroll", tabindex: "0", role: "group", "aria-labelledby": titleId });
    const notes = h("ul", { class: "ampw-notes" });
    const notesTitle = h("summary", {});
    const below = h("details", { class: "ampw-plan-details", open: true }, notesTitle, notes);
    body.append(
      h("details", { class: "ampw-explained", open: true }, h("summary", {}, say("What is predicted")),
        h("p", {}, model.get("explanation")), h("p", {}, model.get("example"))),
      h("div", { class: "ampw-choices" }, ask, confirm, noBatch), progress, whyNot, table, below);

    const draw = () => {
      el.hidden = model.get("gone");
      const locked = asked.locked();
      const pending = model.get("pending") || asked.value("ask", false);
      const off = locked || pending || model.get("why_no_batch") !== "";
      setText(ask, pending ? say("Predicting …") : model.get("button"));
      ask.setAttribute("aria-busy", String(pending));
      setOff(ask, off);
      const hideConfirm = model.get("confirm") === "";
      if (hideConfirm && document.activeElement === confirm) ask.focus({ preventScroll: true });
      setText(confirm, model.get("confirm"));
      setOff(confirm, off);
      setText(noBatch, model.get("why_no_batch"));
      const hide = !pending || locked;
      if (hide && progress.contains(document.activeElement)) ask.focus({ preventScroll: true });
      progress.hidden = hide;
      const percent = model.get("pending") ? Math.round(100 * model.get("fraction")) : 0;
      bar.style.width = `${percent}%`;
      track.setAttribute("aria-valuenow", percent);
      setText(doing, model.get("progress") || say("Asked for …"));
      track.setAttribute("aria-valuetext", doing.textContent);
      setOff(cancel, model.get("cancelling") || asked.value("cancel", false));
      setText(whyNot, model.get("why_not"));
      setText(summary, model.get("caption"));
      const rows = model.get("rows");
      table.hidden = !rows.length;
      putAnew(table, rows, () => (rows.length ? [plainTable(rows, model.get("words"), titleId)] : []));
      const texts = model.get("notes");
      below.hidden = !texts.length;
      setText(notesTitle, model.get("notes_title"));
      putAnew(notes, texts, () => texts.map((text) => h("li", {}, text)));
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
