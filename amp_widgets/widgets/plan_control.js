const SETTLES_MS = 350; // after the last move of the slider it is planned for

export default {
  render({ model, el }) {
    const { body, heading, titleId, setWaiting, showLost, remove } = frame(el, say("From a budget to a plan"), "ampw-plan");
    const summary = h("span", { class: "ampw-dim" });
    heading.append(summary);
    const fieldId = uid();
    const errorId = uid();
    const noBatchId = uid();
    const field = h("input", {
      type: "text", id: fieldId, placeholder: "8 GB", spellcheck: "false", autocomplete: "off", "aria-describedby": errorId,
      oninput: () => { typed = true; draw(); },
      onchange: () => commit(),
      onkeydown: (event) => {
        if (event.key === "Enter") { event.preventDefault(); propose(); }
        else if (event.key === "Escape") { typed = false; draw(); }
      },
    });
    const slider = h("input", { type: "range", oninput: () => slide(), "aria-label": say("Memory budget") });
    const least = h("span", { class: "ampw-dim" });
    const most = h("span", { class: "ampw-dim" });
    const range = h("div", { class: "ampw-plan-range" }, least, slider, most);
    const button = h("button", { type: "button", "aria-describedby": noBatchId, onclick: () => propose() });
    const cancel = h("button", { type: "button", hidden: true, onclick: () => asked.ask({ cancel: true }, { cancel: true }) }, say("Cancel"));
    const error = h("p", { class: "ampw-sentence ampw-stale", id: errorId, role: "alert", hidden: true });
    const noBatch = h("span", { class: "ampw-dim", id: noBatchId, hidden: true });
    const whyNot = h("p", { class: "ampw-sentence ampw-stale", role: "status", hidden: true });
    const sentence = h("p", { class: "ampw-difference ampw-plan-sentence", role: "status", hidden: true });
    const staleId = uid();
    const stale = h("p", { class: "ampw-sentence ampw-stale", id: staleId, hidden: true });
    const layers = h("ul", { class: "ampw-plan-layers", "aria-label": say("Layers of the plan"), tabindex: "0" });
    const use = h("button", { type: "button", class: "ampw-plan-use", "aria-describedby": staleId, onclick: () => asked.ask({ use: true }, { use: "requested" }) });
    const measured = h("span", { class: "ampw-plan-measured", role: "status" });
    const using = h("div", { class: "ampw-choices", hidden: true }, use, measured);
    const others = h("ul", { class: "ampw-plan-others" });
    const table = h("div", { class: "ampw-plan-scroll", tabindex: "0", role: "region", "aria-label": say("Sets of layers") });
    const obtained = h("p", {});
    const details = h("details", { class: "ampw-plan-details" }, h("summary", {}, say("All sets on the curve, and how this was obtained")), table, obtained);
    body.append(
      h("details", { class: "ampw-explained", open: true }, h("summary", {}, say("What is planned")),
        h("p", {}, model.get("explanation")), h("p", {}, model.get("example"))),
      h("div", { class: "ampw-choices" },
        h("span", { class: "ampw-choice ampw-plan-field" }, h("label", { for: fieldId }, say("Memory budget")), field), range, button, cancel, noBatch),
      error, whyNot, sentence, others, stale, layers, using, details);

    let typed = false; // something that was not sent yet
    let sliding = null; // the place of the slider, until it is sent
    let timer = null;
    const commit = () => {
      if (!typed || asked.locked()) return;
      typed = false;
      asked.ask({ text: field.value }, { text: field.value });
    };
    const propose = () => {
      if (isOff(button)) return;
      clearTimeout(timer);
      sliding = null;
      typed = false;
      asked.ask({ propose: true, text: field.value }, { plan: true, text: field.value });
    };
    const slide = () => {
      if (asked.locked() || !model.get("range").length) return;
      sliding = Number(slider.value);
      typed = false;
      clearTimeout(timer);
      timer = setTimeout(() => {
        const budget = sliding;
        sliding = null;
        asked.ask({ budget }, { plan: true, budget, text: sizeText(budget) });
      }, SETTLES_MS);
      draw();
    };
    let buttons = [];
    const fillOthers = () => {
      const offered = model.get("alternatives");
      const labels = JSON.stringify(offered.map(({ label, use }) => [label, use === null]));
      if (others.dataset.drawn === labels) return;
      others.dataset.drawn = labels;
      buttons = offered.map(({ use }, position) => {
        const text = h("span", {});
        const press = use === null ? null : h("button", {
          type: "button", onclick: () => asked.ask({ alternative: position }, { [`alternative ${position}`]: "requested" }),
        });
        return { text, press, item: h("li", {}, text, ...(press === null ? [] : [press])) };
      });
      others.replaceChildren(...buttons.map(({ item }) => item));
    };
    const how = (state) => ({ "": say("Use"), requested: say("Requested"), "in force": say("In force") })[state];

    const draw = () => {
      const locked = asked.locked();
      const pending = model.get("pending") || asked.value("plan", false);
      if (!typed) field.value = sliding === null ? asked.value("text", model.get("budget_text")) : sizeText(sliding);
      field.readOnly = locked;
      field.setAttribute("aria-invalid", String(model.get("budget_error") !== ""));
      const [low, high, lowText, highText] = model.get("range");
      range.hidden = low === undefined;
      if (low !== undefined) {
        Object.assign(slider, { min: low, max: high, step: (high - low) / 200 });
        slider.value = sliding ?? asked.value("budget", model.get("budget_bytes"));
        slider.setAttribute("aria-valuetext", field.value);
        slider.disabled = locked;
        setText(least, lowText);
        setText(most, highText);
      }
      setText(button, pending ? say("Planning …") : say("Propose a plan"));
      button.setAttribute("aria-busy", String(pending));
      setOff(button, locked || model.get("why_no_batch") !== "" || (pending && !typed && sliding === null));
      const hideCancel = !pending || locked;
      if (hideCancel && document.activeElement === cancel) button.focus({ preventScroll: true });
      const cancelling = model.get("cancelling") || asked.value("cancel", false);
      setOff(cancel, hideCancel || cancelling);
      setText(cancel, cancelling ? say("Cancelling …") : say("Cancel"));
      cancel.hidden = hideCancel; // last, as a text shows it
      setText(error, model.get("budget_error"));
      setText(noBatch, model.get("why_no_batch"));
      setText(whyNot, model.get("why_not"));
      setText(summary, model.get("caption"));
      setText(sentence, model.get("sentence"));
      sentence.classList.toggle("ampw-plan-misfit", !model.get("fits"));
      setText(stale, model.get("stale"));
      const names = model.get("layers");
      putAnew(layers, names, () => names.map((name) => h("li", {}, name)));
      layers.hidden = !names.length;
      const planned = model.get("sentence") !== "";
      using.hidden = !planned;
      const state = asked.value("use", model.get("use"));
      const what = model.get("fits") ? (names.length ? say("Use this plan") : say("Use this plan: no layer")) : say("Use these layers");
      setText(use, state === "" ? what : state === "in force" ? say("In force") : say("Requested"));
      setOff(use, locked || state !== "" || model.get("stale") !== "");
      setText(measured, model.get("measured"));
      fillOthers();
      model.get("alternatives").forEach(({ text, label, use: its }, position) => {
        const { text: line, press } = buttons[position];
        setText(line, text);
        if (press === null) return;
        const stands = asked.value(`alternative ${position}`, its);
        setText(press, how(stands));
        press.setAttribute("aria-label", `${how(stands)}: ${label}`);
        setOff(press, locked || stands !== "");
      });
      others.hidden = !buttons.length;
      const rows = model.get("rows");
      details.hidden = !rows.length;
      putAnew(table, rows, () => (rows.length ? [plainTable(rows, [0, 1, 4, 5], titleId)] : []));
      setText(obtained, model.get("obtained"));
      setWaiting(state === "requested" || asked.waits());
    };
    const asked = asking(model, el, showLost, draw);
    model.on("change", draw);
    draw();
    return () => {
      clearTimeout(timer);
      remove();
      asked.remove();
    };
  },
};

/** As Python's `memory_text`. */
function sizeText(bytes) {
  if (bytes < 1000) return `${bytes.toFixed(0)} B`;
  for (const unit of ["kB", "MB", "GB", "TB"]) {
    bytes /= 1000;
    if (bytes < 999.95 || unit === "TB") return `${bytes.toFixed(1)} ${unit}`;
  }
}
