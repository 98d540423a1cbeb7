// Beside page.js and line_sample.js.

const ALIGNS = [["step", say("step")], ["time", say("time since it began")]];

export default {
  render({ model, el }) {
    const { body, titleId, setWaiting, showLost, remove } = frame(el, say("Compare runs"), "ampw-runs");
    const group = uid();
    const radios = ALIGNS.map(([name, text]) => {
      const radio = h("input", { type: "radio", name: group, value: name, onchange: () => asked.ask({ align: name }, { align: name }) });
      return { name, radio, label: h("label", { class: "ampw-segment" }, radio, h("span", {}, text)) };
    });
    const along = h("fieldset", { class: "ampw-along" }, h("legend", {}, say("Along")),
      h("div", { class: "ampw-segments" }, ...radios.map(({ label }) => label)));
    const smoothingId = uid();
    const smoothing = h("select", {
      id: smoothingId,
      title: say("Of loss and step time: an exponential moving average. What is not finite does not count. Sizes and scales are never averaged."),
      onchange: () => asked.ask({ smoothing: Number(smoothing.value) }, { smoothing: Number(smoothing.value) }),
    }, ...model.get("smoothings").map(([steps, text]) => h("option", { value: steps }, text)));
    const tick = (onchange) => {
      const id = uid();
      const box = h("input", { type: "checkbox", id, onchange: () => onchange(box.checked) });
      return { box, id };
    };
    const plots = model.get("metrics").map(([metric, text]) => {
      const { box, id } = tick((on) => asked.ask({ metric, on }, { [`metric ${metric}`]: on }));
      return { metric, box, element: h("span", { class: "ampw-tick" }, box, h("label", { for: id }, text)) };
    });
    const runs = model.get("runs").map((run, place) => {
      const { box, id } = tick((on) => asked.ask({ run: place, on }, { [`run ${place}`]: on }));
      const state = h("span", { class: "ampw-dim" });
      const whyNot = h("span", { class: "ampw-why-not", hidden: true });
      const label = h("label", { for: id, title: run.name }, lineSample(run), h("b", {}, run.name), state);
      return { box, state, whyNot, element: h("li", {}, h("span", { class: "ampw-tick" }, box, label), whyNot) };
    });
    body.append(
      h("div", { class: "ampw-choices" }, along,
        h("span", { class: "ampw-choice" }, h("label", { for: smoothingId }, say("Smoothing")), smoothing),
        h("fieldset", { class: "ampw-plots" }, h("legend", {}, say("Plots")), ...plots.map(({ element }) => element))),
      h("ul", { class: "ampw-run-list", "aria-labelledby": titleId }, ...runs.map(({ element }) => element)));

    const draw = () => {
      const locked = asked.locked();
      for (const { name, radio } of radios) {
        radio.checked = asked.value("align", model.get("align")) === name;
        radio.disabled = locked;
      }
      smoothing.value = asked.value("smoothing", model.get("smoothing"));
      smoothing.disabled = locked;
      model.get("metrics").forEach(([metric, , on], i) => {
        plots[i].box.checked = asked.value(`metric ${metric}`, on);
        plots[i].box.disabled = locked;
      });
      model.get("runs").forEach((run, place) => {
        const { box, state, whyNot } = runs[place];
        box.checked = asked.value(`run ${place}`, run.shown);
        box.disabled = locked;
        setText(state, run.state);
        setText(whyNot, run.why_not);
      });
      setWaiting(false);
    };
    const asked = asking(model, el, showLost, draw);
    model.on("change", draw);
    draw();
    const view = uid(); // Python redraws only while somebody looks
    const tell = (open) => { try { model.send({ view, open }); } catch { /* no kernel: nobody to tell */ } };
    tell(true);
    return () => {
      tell(false);
      remove();
      asked.remove();
    };
  },
};
