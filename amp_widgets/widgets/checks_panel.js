// [kind, its name, what its button says, while it is waited for]
const CHECKS = [
  ["check", say("Parity"), say("Check parity"), say("Checking at the next step …")],
  ["preflight", say("Preflight"), say("Preflight"), say("Looking at the next step …")],
];

export default {
  render({ model, el }) {
    const { body, setWaiting, showLost, remove } = frame(el, say("Checks"), "ampw-checks");
    const parts = CHECKS.map(([kind, name, label, waits]) => {
      const button = h("button", { type: "button", onclick: () => asked.ask({ inspect: kind }, { [kind]: true }) });
      const whyNot = h("p", { class: "ampw-sentence ampw-stale", role: "status", hidden: true });
      const caption = h("span", { class: "ampw-dim" });
      const report = h("div", { class: "ampw-report-html" });
      const title = h("h4", {}, name, " ", caption);
      const area = h("div", { class: "ampw-check-report", role: "region", "aria-label": name, tabindex: "0", hidden: true }, title, report);
      return { kind, label, waits, button, whyNot, caption, report, area, html: "" };
    });
    const automaticId = uid();
    const automatic = h("input", {
      type: "checkbox", id: automaticId,
      onchange: () => asked.ask({ automatic: automatic.checked }, { automatic: automatic.checked }),
    });
    const tick = h("span", { class: "ampw-tick" }, automatic, h("label", { for: automaticId }, say("check parity after each change of the checkpointed layers")));
    const noBatch = h("span", { class: "ampw-dim", id: uid(), hidden: true });
    body.append(
      h("details", { class: "ampw-explained", open: true }, h("summary", {}, say("What is checked")),
        ...model.get("explanations").flat().map((text) => h("p", {}, text))),
      h("div", { class: "ampw-choices" }, ...parts.map((part) => part.button), tick),
      noBatch,
      ...parts.flatMap((part) => [part.whyNot, part.area]));

    const draw = () => {
      const locked = asked.locked();
      let waiting = false;
      for (const part of parts) {
        const { html, caption, why_not, pending } = model.get(part.kind);
        const waits = pending || asked.value(part.kind, false);
        waiting = waiting || waits;
        setText(part.button, waits ? part.waits : part.label);
        part.button.setAttribute("aria-busy", String(waits));
        setOff(part.button, locked || waits || (part.kind === "check" && model.get("why_no_batch") !== ""));
        setText(part.whyNot, why_not);
        setText(part.caption, caption);
        part.area.hidden = html === "";
        if (part.html !== html) part.report.innerHTML = part.html = html; // made in Python, where all that is data was escaped
      }
      automatic.checked = asked.value("automatic", model.get("automatic"));
      automatic.disabled = locked || model.get("why_no_batch") !== "";
      setText(noBatch, model.get("why_no_batch"));
      if (noBatch.hidden) parts[0].button.removeAttribute("aria-describedby");
      else parts[0].button.setAttribute("aria-describedby", noBatch.id);
      setWaiting(waiting);
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
