export default {
  render({ model, el }) {
    const { body, setWaiting, showLost, remove } = frame(el, "Memory within a step", "ampw-memory");
    const button = h("button", { type: "button", class: "ampw-profile", onclick: () => asked.ask({ profile: true }, { profile: true }) }, h("span", {}));
    const whyNot = h("span", { class: "ampw-dim", id: uid(), hidden: true });
    const select = (label, title) => {
      const id = uid();
      const list = h("select", { id, title, onchange: () => choose() });
      return { list, field: h("span", { class: "ampw-choice" }, h("label", { for: id }, label), list) };
    };
    const before = select("Before", "Drawn as an outline; choose none to see one step alone");
    const after = select("After", "Drawn as areas");
    const swap = h("button", { type: "button", title: "Exchange before and after", "aria-label": "Exchange before and after", onclick: () => exchange() }, "⇄");
    const choices = h("div", { class: "ampw-choices" }, before.field, swap, after.field);
    const sentence = h("p", { class: "ampw-difference", role: "status" });
    const details = h("ul", { class: "ampw-notes" });
    const report = h("div", { class: "ampw-report", role: "alert", hidden: true });
    body.append(h("div", { class: "ampw-choices" }, button, whyNot), report, choices, sentence, details);

    const NONE = "none"; // a label is shown with a sign before it, so that none of them is this
    const ask = (first, second) => {
      const labels = [first, second].filter((value) => value !== NONE).map((value) => value.slice(1));
      asked.ask({ show: labels }, { shown: [first, second] });
    };
    const choose = () => ask(before.list.value === after.list.value ? NONE : before.list.value, after.list.value);
    const exchange = () => before.list.value !== NONE && ask(after.list.value, before.list.value);

    let options = null;
    const fill = () => {
      const made = () => options.map(([label, text]) => h("option", { value: `=${label}` }, text));
      before.list.replaceChildren(h("option", { value: NONE }, "nothing: one step alone"), ...made());
      after.list.replaceChildren(...made());
    };
    const draw = () => {
      const locked = asked.locked();
      const pending = model.get("pending") || asked.value("profile", false);
      setText(button.firstChild, pending ? "Profiling the next step …" : "Profile the next step");
      button.disabled = locked || pending || model.get("why_not") !== "";
      button.setAttribute("aria-busy", String(pending));
      setText(whyNot, model.get("why_not"));
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
      swap.disabled = locked || first === NONE;
      choices.hidden = !options.length;
      before.field.hidden = swap.hidden = options.length < 2;
      setText(sentence, model.get("sentence"));
      const notes = model.get("details");
      if (details.childElementCount !== notes.length || notes.some((note, i) => details.children[i].textContent !== note)) {
        details.replaceChildren(...notes.map((note) => h("li", {}, note)));
      }
      const lines = model.get("report");
      if (report.childElementCount !== lines.length || lines.some((text, i) => report.children[i].textContent !== text)) {
        report.replaceChildren(...lines.map((text) => h("p", {}, text)));
      }
      report.hidden = !lines.length;
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
