export default {
  render({ model, el }) {
    el.classList.add("ampw");
    const group = uid();
    const idOf = (name, what) => `${group}-${what}-${name}`;
    let lost = false;
    const buttons = new Map();
    const list = h("div", { class: "ampw-tabs-list", role: "tablist", "aria-label": say("What is looked at") });
    for (const [name, label] of model.get("tabs")) {
      const button = h("button", {
        type: "button", role: "tab", id: idOf(name, "tab"), "aria-controls": idOf(name, "panel"), onclick: () => choose(name),
      }, label);
      buttons.set(name, button);
      list.append(button);
    }
    el.append(list);
    let chosen = null; // without a kernel
    const shown = () => chosen ?? asked.value("tab", model.get("selected"));
    const choose = (name) => {
      if (name === shown()) return;
      asked.ask({ tab: name }, { tab: name });
      if (!lost) return;
      chosen = name;
      draw();
    };
    list.addEventListener("keydown", (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
      const names = [...buttons.keys()].filter((name) => !buttons.get(name).disabled);
      const at = names.indexOf(shown());
      const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      const name = names[(next + names.length) % names.length];
      choose(name);
      buttons.get(name).focus();
    });

    // The panels are other widgets, which come when they come.
    let box = null;
    const arrange = () => {
      box ??= el.closest(".ampw-tabs");
      if (box === null) return;
      const name = shown();
      if (box.dataset.shown !== name) box.dataset.shown = name;
      for (const panel of box.querySelectorAll(":scope > .ampw-tab")) {
        const own = [...buttons.keys()].find((one) => panel.classList.contains(`ampw-tab-${one}`));
        if (own === undefined || panel.id === idOf(own, "panel")) continue;
        panel.id = idOf(own, "panel");
        panel.setAttribute("role", "tabpanel");
        panel.setAttribute("aria-labelledby", idOf(own, "tab"));
      }
      if (!watched) children.observe(box, { childList: true });
      watched = true;
    };
    let watched = false;
    const children = new MutationObserver(() => arrange());
    const placed = new ResizeObserver(() => arrange());
    placed.observe(el);

    const draw = () => {
      const name = shown();
      for (const [one, button] of buttons) {
        button.setAttribute("aria-selected", String(one === name));
        button.tabIndex = one === name ? 0 : -1;
        button.disabled = one !== name && (model.get("closed").includes(one) || (lost && document.getElementById(idOf(one, "panel")) === null));
      }
      arrange();
    };
    const removeKeys = keepKeys(el);
    const asked = asking(model, el, () => { lost = true; }, draw);
    model.on("change", draw);
    draw();
    return () => {
      children.disconnect();
      placed.disconnect();
      removeKeys();
      asked.remove();
    };
  },
};
