const SIZES = [["normal", say("normal size")], ["large", say("large")], ["very-large", say("very large")]];
const THEMES = [["notebook", say("as the notebook")], ["light", say("light")], ["dark", say("dark")], ["high-contrast", say("high contrast")]];
const CHANGED = "amp-widgets-presenting";
const VIEWS = Symbol.for("amp_widgets.presenting");

export default {
  render({ model, el }) {
    el.classList.add("ampw", "ampw-presenting");
    const groups = new Map();
    const group = (name, title, choices) => {
      const [id, key] = [uid(), uid()];
      const inputs = choices.map(([value, text]) => {
        const input = h("input", { type: "radio", name: key, value, onchange: () => choose(name, value) });
        return [input, h("label", { class: "ampw-tick" }, input, h("span", {}, text))];
      });
      groups.set(name, inputs.map(([input]) => input));
      return h("div", { class: "ampw-present-group", role: "radiogroup", "aria-labelledby": id },
        h("span", { class: "ampw-dim", id }, title), ...inputs.map(([, label]) => label));
    };
    const choose = (name, value) => {
      apply({ ...onPage(), [name]: value });
      asked.ask({ [name]: value }, { [name]: value });
    };
    const choices = h("div", { class: "ampw-present-choices" },
      group("type_size", say("Type size"), SIZES), group("theme", say("Theme"), THEMES));
    const menu = model.get("opened") ? choices : h("details", {}, h("summary", { "aria-label": say("Display: type size and theme") }, say("Display")), choices);
    el.append(menu);
    el.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !menu.open) return;
      event.stopPropagation();
      menu.open = false;
      menu.querySelector("summary").focus();
    });
    const closeMenu = (event) => { if (menu.open && !el.contains(event.target)) menu.open = false; };
    document.addEventListener("pointerdown", closeMenu);

    const draw = () => {
      const shown = onPage(); // which the dashboard of another kernel may have changed
      for (const [name, inputs] of groups) for (const input of inputs) input.checked = input.value === shown[name];
    };
    const told = () => apply({ type_size: model.get("type_size"), theme: model.get("theme") });
    document.addEventListener(CHANGED, draw);
    const removeKeys = keepKeys(el);
    const asked = asking(model, el, () => {}, draw);
    model.on("change:type_size change:theme", told);
    const views = (globalThis[VIEWS] ??= new Set());
    views.add(el);
    // A page may have dashboards of several kernels: one that was told nothing leaves it as it is.
    if (model.get("type_size") !== "normal" || model.get("theme") !== "notebook") told();
    draw();
    return () => {
      views.delete(el);
      if (views.size === 0) apply({ type_size: "normal", theme: "notebook" });
      document.removeEventListener("pointerdown", closeMenu);
      document.removeEventListener(CHANGED, draw);
      removeKeys();
      asked.remove();
    };
  },
};

/** See themes.css and plotly_page.js. */
function apply({ type_size: size, theme }) {
  const { dataset } = document.documentElement;
  if (size === "normal") delete dataset.ampType;
  else dataset.ampType = size;
  if (theme === "notebook") delete dataset.ampTheme;
  else dataset.ampTheme = theme;
  document.dispatchEvent(new Event(CHANGED));
}

function onPage() {
  const { ampType, ampTheme } = document.documentElement.dataset;
  return { type_size: ampType ?? "normal", theme: ampTheme ?? "notebook" };
}
