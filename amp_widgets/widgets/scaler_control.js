const SCALER_FIELDS = [
  ["growth_factor", say("Growth factor"), say("The scale is multiplied by this after as many good steps in a row as the growth interval says; above 1")],
  ["backoff_factor", say("Backoff factor"), say("The scale is multiplied by this after a step with inf or NaN in its gradients; between 0 and 1")],
  ["growth_interval", say("Growth interval"), say("Steps without inf or NaN, in a row, until the scale grows")],
  ["min_scale", say("Floor"), say("Floor (min_scale): the scale does not fall below this, such as 2^4; empty for none")],
  ["max_scale", say("Cap"), say("Cap (max_scale): the scale does not grow above this, such as 2^24; empty for none")],
];

export default {
  render({ model, el }) {
    const { body, setWaiting, showLost, remove } = frame(el, say("Loss scaling"), "ampw-scaler");
    const checkId = uid();
    const check = h("input", {
      type: "checkbox", id: checkId, onchange: () => asked.ask({ setting: "scaling", value: check.checked }, { scaling: check.checked }),
    });
    const sentence = h("p", { class: "ampw-sentence", role: "status" });

    const sliderId = uid();
    const readout = h("output", { for: sliderId });
    let timer = 0;
    const send = () => {
      clearTimeout(timer);
      timer = 0;
      const value = Number(slider.value);
      asked.ask({ setting: "init_scale", value }, { exponent: value });
    };
    const slider = h("input", {
      type: "range", id: sliderId, min: 0, max: 40, step: 1,
      onkeydown: (event) => { if (event.key === " ") event.preventDefault(); }, // it would scroll the notebook
      oninput: () => showReadout(Number(slider.value)),
      onchange: () => { clearTimeout(timer); timer = setTimeout(send, 150); }, // a held arrow key is one request
    });
    const showReadout = (exponent, text = `2^${exponent} = ${2 ** exponent}`) => {
      readout.value = text;
      slider.setAttribute("aria-valuetext", readout.value);
    };
    const live = h("span", { class: "ampw-live" });

    const inputs = new Map();
    const commit = (name) => {
      const input = inputs.get(name);
      if (input.value === input.dataset.drawn) return; // asked for already, with Enter
      asked.ask({ setting: name, value: input.value }, { [name]: input.value });
    };
    const labels = new Map([["init_scale", h("label", { for: sliderId }, say("Initial scale"))], ["scaling", h("label", { for: checkId }, say("Scale the loss"))]]);
    const grid = h("div", { class: "ampw-fields" });
    for (const [name, label, title] of SCALER_FIELDS) {
      const id = uid();
      const input = h("input", {
        type: "text", id, title, inputmode: "decimal", autocomplete: "off", spellcheck: "false", placeholder: name.endsWith("_scale") ? say("none") : null,
        onchange: () => commit(name),
        onkeydown: (event) => {
          if (event.key === "Escape") input.value = input.dataset.drawn = shownText(name);
          if (event.key === "Enter" && !event.shiftKey && !event.ctrlKey && !event.metaKey && !event.altKey) {
            event.preventDefault(); // in a notebook, the browser's own change event may never come
            commit(name);
          }
        },
      });
      inputs.set(name, input);
      labels.set(name, h("label", { for: id, title }, label));
      grid.append(h("div", { class: "ampw-field" }, labels.get(name), input));
    }
    const rule = h("fieldset", { "aria-label": say("The loss scale and its rule") },
      h("div", { class: "ampw-between" }, labels.get("init_scale"), readout), slider, live, grid);
    body.append(h("div", { class: "ampw-tick" }, check, labels.get("scaling")), sentence, rule);

    const shownText = (name) => asked.value(name, model.get("fields")[name] ?? "");
    const draw = () => {
      const locked = asked.locked();
      const waiting = model.get("waiting");
      check.checked = asked.value("scaling", model.get("scaling"));
      check.disabled = locked;
      setText(sentence, model.get("sentence"));
      rule.disabled = locked;
      if (!timer && !slider.matches(":active")) {
        const exponent = asked.value("exponent", model.get("exponent"));
        slider.value = exponent;
        showReadout(exponent, exponent === model.get("exponent") ? model.get("init_scale") : undefined);
      }
      const scale = model.get("live_scale");
      setText(live, scale && (locked ? say("scale then {scale}", { scale }) : say("live scale {scale}", { scale })));
      for (const [name, input] of inputs) {
        const editing = input.matches(":focus") && input.value !== input.dataset.drawn && !asked.waits();
        if (!editing) {
          input.value = shownText(name);
          input.dataset.drawn = input.value;
        }
      }
      for (const [name, label] of labels) label.classList.toggle("ampw-changed", waiting.includes(name));
      setWaiting(waiting.length > 0 || asked.waits());
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
