export default {
  render({ model, el }) {
    const { body, setWaiting, showLost, remove } = frame(el, say("Memory within a step"), "ampw-memory");
    const button = h("button", { type: "button", class: "ampw-profile", onclick: () => asked.ask({ profile: true }, { profile: true }) }, h("span", {}));
    const whyNot = h("span", { class: "ampw-dim", id: uid(), hidden: true });
    const select = (label, title) => {
      const id = uid();
      const list = h("select", { id, title, onchange: () => choose() });
      const name = h("label", { for: id }, label);
      return { list, name, field: h("span", { class: "ampw-choice" }, name, list) };
    };
    const before = select(say("Before"), say("Drawn as an outline; choose none to see one step alone"));
    const after = select(say("After"), say("Drawn as areas"));
    const swap = h("button", { type: "button", title: say("Exchange before and after"), "aria-label": say("Exchange before and after"), onclick: () => exchange() }, "⇄");
    const choices = h("div", { class: "ampw-choices" }, before.field, swap, after.field);
    const sentence = h("p", { class: "ampw-difference", role: "status" });
    const details = h("ul", { class: "ampw-notes" });
    const summary = h("summary", {});
    const reportLines = h("div", {});
    const dismiss = h("button", { type: "button", title: say("Take this report away"), onclick: () => asked.ask({ dismiss: true }) }, say("Dismiss"));
    const checkpoint = h("button", { type: "button", onclick: () => asked.ask({ checkpoint: true }) });
    const whatNext = h("span", { role: "status", hidden: true });
    const folded = h("details", {}, summary, reportLines, h("div", { class: "ampw-choices" }, checkpoint, whatNext, dismiss));
    const report = h("div", { class: "ampw-report", hidden: true }, folded);
    body.append(h("div", { class: "ampw-choices" }, button, whyNot), report, choices, sentence, details);

    const NONE = "none"; // a label is shown with a sign before it, so that none of them is this
    const ask = (first, second) => {
      const labels = [first, second].filter((value) => value !== NONE).map((value) => value.slice(1));
      asked.ask({ show: labels }, { shown: [first, second] });
    };
    const choose = () => ask(before.list.value === after.list.value ? NONE : before.list.value, after.list.value);
    const exchange = () => before.list.value !== NONE && ask(after.list.value, before.list.value);

    // While nothing has fitted since, it is open and an alert. Then it says so, and what was reported is folded away.
    let reported = null;
    let fits = null;
    const drawReport = () => {
      const [heading = "", ...rest] = model.get("report");
      const fitted = model.get("fitted");
      const lines = fitted ? [heading, ...rest] : rest;
      if (model.get("report") !== reported || (fitted !== "") !== fits) {
        const again = model.get("report") !== reported && fits !== null;
        reported = model.get("report");
        if (again || (fitted !== "") !== fits) folded.open = fitted === "";
        fits = fitted !== "";
        reportLines.replaceChildren(...lines.map((text) => h("p", {}, text)));
      }
      setText(summary, fitted || heading);
      report.classList.toggle("ampw-over", fits);
      if (fits) report.removeAttribute("role");
      else report.setAttribute("role", "alert");
      report.hidden = heading === "";
      const proposed = model.get("proposed");
      setText(checkpoint, !proposed.length ? "" : proposed.length > 1 ? say("Checkpoint the {count} proposed layers", { count: proposed.length }) : say("Checkpoint {name}", { name: proposed[0] }));
      setText(whatNext, model.get("what_next"));
      checkpoint.title = say("In force from the next step: {changes}", { changes: proposed.join(", ") });
      for (const button of [checkpoint, dismiss]) setOff(button, asked.locked());
    };

    let options = null;
    const fill = () => {
      const made = () => options.map(([label, text]) => h("option", { value: `=${label}` }, text));
      before.list.replaceChildren(h("option", { value: NONE }, say("nothing: one step alone")), ...made());
      after.list.replaceChildren(...made());
    };
    const draw = () => {
      const locked = asked.locked();
      const pending = model.get("pending") || asked.value("profile", false);
      const waits = model.get("trains") ? say("Profiling the next step …") : say("The next step will be profiled when training goes on");
      setText(button.firstChild, pending ? waits : say("Profile the next step"));
      setOff(button, locked || pending);
      button.hidden = model.get("recorded");
      button.setAttribute("aria-busy", String(pending));
      setText(whyNot, model.get("why_not") && say("The last one was not profiled: {why}", { why: model.get("why_not") }));
      if (model.get("why_not")) button.setAttribute("aria-describedby", whyNot.id);
      else button.removeAttribute("aria-describedby");
      if (options !== model.get("options")) {
        options = model.get("options");
        fill();
      }
      const shown = model.get("shown").map((label) => `=${label}`);
      const [first, second] = asked.value("shown", shown.length === 2 ? shown : [NONE, ...shown]);
      before.list.value = first;
      if (second) after.list.value = second;
      before.list.disabled = after.list.disabled = locked;
      setOff(swap, locked || first === NONE);
      choices.hidden = !options.length;
      before.field.hidden = swap.hidden = options.length < 2;
      setText(after.name, options.length < 2 ? say("Step") : say("After"));
      setText(sentence, model.get("sentence"));
      const notes = model.get("details");
      if (details.childElementCount !== notes.length || notes.some((note, i) => details.children[i].textContent !== note)) {
        details.replaceChildren(...notes.map((note) => h("li", {}, note)));
      }
      drawReport();
      setWaiting(pending);
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
