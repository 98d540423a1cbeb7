const EVERY = 10;
const SLIDE_REST_MS = 60; // while it is dragged, the picture follows a little later

export default {
  render({ model, el }) {
    const { body, setWaiting, showLost, remove } = frame(el, say("Gradient range"), "ampw-gradients");
    const sample = h("button", { type: "button", class: "ampw-profile", onclick: () => asked.ask({ sample: true }, { sample: true }) }, h("span", {}));
    const everyId = uid();
    const every = h("input", {
      type: "checkbox", id: everyId,
      onchange: () => asked.ask({ every: every.checked ? EVERY : 0 }, { every: every.checked ? EVERY : 0 }),
    });
    const everyLabel = h("label", { for: everyId });
    const whyNot = h("span", { class: "ampw-dim", hidden: true });

    const sliderId = uid();
    const readout = h("output", { for: sliderId });
    let rest = 0;
    const slide = () => {
      rest = 0;
      const exponent = Number(slider.value);
      asked.ask({ exponent }, { exponent });
    };
    const slider = h("input", {
      type: "range", id: sliderId, min: 0, max: 40, step: 1,
      onkeydown: (event) => { if (event.key === " ") event.preventDefault(); }, // it would scroll the notebook
      oninput: () => {
        showReadout(Number(slider.value));
        rest = rest || setTimeout(slide, SLIDE_REST_MS);
      },
    });
    const showReadout = (exponent) => {
      setText(readout, `2^${exponent}`);
      slider.setAttribute("aria-valuetext", `2^${exponent}`);
      drawUse(exponent);
    };
    const measured = h("span", { class: "ampw-dim" });
    const use = h("button", { type: "button", onclick: () => asked.ask({ use: true }) });
    const suggest = h("button", {
      type: "button", title: say("Move the slider there"),
      onclick: () => asked.ask({ exponent: model.get("suggested") }, { exponent: model.get("suggested") }),
    });
    const usable = h("span", { class: "ampw-dim" });
    const sentence = h("p", { class: "ampw-difference", role: "status" });
    const details = h("ul", { class: "ampw-notes" });
    const whatIf = h("fieldset", { "aria-label": say("What another loss scale would make of these gradients") },
      h("div", { class: "ampw-what-if" }, h("label", { for: sliderId }, say("What if the loss scale were")), readout, slider),
      sentence, details, h("div", { class: "ampw-choices" }, use, suggest, usable));
    const trouble = h("div", { class: "ampw-trouble", hidden: true });
    const example = h("p", { class: "ampw-sentence ampw-explained" }, model.get("example"));
    const often = h("span", { class: "ampw-tick" }, every, everyLabel);
    const why = h("details", { class: "ampw-explained" }, h("summary", {}, say("Why steps are skipped")), ...model.get("skips_explained").map((text) => h("p", {}, text)));
    for (const one of [example, sample, often, use, usable, why]) one.classList.toggle("ampw-not-recorded", model.get("recorded"));
    body.append(
      h("p", { class: "ampw-sentence ampw-explained" }, model.get("explanation")),
      example, h("div", { class: "ampw-choices" }, sample, often, whyNot, measured), why, trouble, whatIf);

    const drawUse = (exponent) => {
      const same = model.get("requested") === exponent;
      setText(use, same ? say("{scale} is set", { scale: `2^${exponent}` }) : say("Use {scale} as loss scale", { scale: `2^${exponent}` }));
      setOff(use, asked.locked() || same);
      const suggested = model.get("suggested");
      setText(suggest, suggested === null || suggested === exponent ? "" : say("Suggested: {scale}", { scale: `2^${suggested}` }));
    };
    const lines = (list, texts) => {
      if (list.childElementCount === texts.length && texts.every((text, i) => list.children[i].textContent === text)) return;
      list.replaceChildren(...texts.map((text) => h("li", {}, text)));
    };
    let told = "";
    const drawTrouble = () => {
      const skips = model.get("skips");
      const diagnoses = model.get("diagnoses");
      const now = JSON.stringify([skips, diagnoses]);
      trouble.hidden = !skips.length && !diagnoses.length;
      if (now === told) return;
      told = now;
      trouble.replaceChildren(
        ...diagnoses.map(([seen, cause]) => h("p", { class: "ampw-report", role: "alert" }, h("b", {}, seen), h("br"), cause)),
        ...(skips.length ? [h("b", {}, say("Skipped steps")), h("ul", { class: "ampw-notes" }, ...skips.map((text) => h("li", {}, text)))] : []));
    };
    const draw = () => {
      const locked = asked.locked();
      const pending = model.get("pending") || asked.value("sample", false);
      const waits = model.get("trains") ? say("Sampling the next step …") : say("The next step will be sampled when training goes on");
      setText(sample.firstChild, pending ? waits : say("Sample the next step"));
      setOff(sample, locked || pending);
      sample.setAttribute("aria-busy", String(pending));
      const steps = asked.value("every", model.get("every"));
      every.checked = steps > 0;
      every.disabled = locked;
      setText(everyLabel, say("every {count} steps", { count: steps || EVERY }));
      setText(whyNot, model.get("why_not") && say("The last one was not sampled: {why}", { why: model.get("why_not") }));
      whatIf.hidden = !model.get("sampled");
      setText(measured, model.get("measured"));
      const exponent = asked.value("exponent", model.get("exponent"));
      slider.disabled = locked;
      setOff(suggest, locked);
      if (!rest && !slider.matches(":active")) slider.value = exponent;
      showReadout(Number(slider.value));
      const [first = "", ...others] = model.get("sentences");
      setText(sentence, first);
      lines(details, [...others, model.get("safe")].filter((text) => text));
      setText(usable, model.get("requested") === exponent ? "" : model.get("usable"));
      drawTrouble();
      setWaiting(pending);
    };
    const asked = asking(model, el, showLost, draw);
    model.on("change", draw);
    draw();
    return () => {
      clearTimeout(rest);
      remove();
      asked.remove();
    };
  },
};
