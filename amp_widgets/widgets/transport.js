const MOVES = [
  ["begin", say("To the beginning"), "M3 3h2v10H3zM13 3v10L6 8z"],
  ["before", say("To the change before"), "M13 3v10L8 8zM8 3v10L3 8z"],
  ["play", say("Play"), "M4 2.500v11l9-5.500z"],
  ["after", say("To the next change"), "M3 3v10l5-5zM8 3v10l5-5z"],
  ["end", say("To the end"), "M11 3h2v10h-2zM3 3v10l7-5z"],
];
const PAUSE_ICON = "M4 3h3v10H4zM9 3h3v10H9z";

export default {
  render({ model, el }) {
    const { body, heading, titleId, showLost, remove } = frame(el, say("Replay"), "ampw-transport");
    const time = h("span", { class: "ampw-dim ampw-time", title: say("Time of the run, its pauses left out") });
    heading.append(time);
    const group = h("div", { class: "ampw-moves", role: "group", "aria-labelledby": titleId });
    const buttons = new Map();
    for (const [move, label, path] of MOVES) {
      const button = h("button", { type: "button", title: label, "aria-label": label, onclick: () => go(move) }, shapeIcon(path));
      buttons.set(move, button);
      group.append(button);
    }
    const playing = () => asked.value("mode", model.get("mode")) === "playing";
    const go = (move) => {
      if (move === "play" && playing()) return asked.ask({ move: "pause" }, { mode: "still" });
      const mode = { play: "playing", follow: "following" }[move];
      asked.ask({ move }, mode ? { mode } : {});
    };

    const speedId = uid();
    const speed = h("select", { id: speedId, title: say("Times as fast as the run was; its pauses are passed over"), onchange: () => asked.ask({ speed: Number(speed.value) }, { speed: Number(speed.value) }) });
    speed.append(...model.get("speeds").map((one) => h("option", { value: String(one) }, `${one}×`)));
    const follow = h("button", {
      type: "button", class: "ampw-follow", title: say("Read what another kernel writes to this file, and stay at the end. Pausing, or going to a step, ends that"),
      onclick: () => go(asked.value("mode", model.get("mode")) === "following" ? "pause" : "follow"),
    }, h("span", { class: "ampw-dot", "aria-hidden": "true" }), h("span", {}, say("Follow the file")));

    // One step is asked for at a time: while an answer is awaited, only the newest place of the slider is kept.
    let wanted = null;
    const seek = (step) => {
      if (asked.waits()) wanted = step;
      else asked.ask({ step }, { step });
      showStep(step);
    };
    const slider = h("input", {
      type: "range", "aria-label": say("Step"), step: 1,
      oninput: () => seek(Number(slider.value)),
      onkeydown: (event) => {
        if (event.key !== " ") return;
        event.preventDefault(); // it would scroll the notebook
        go("play");
      },
    });
    const marks = h("div", { class: "ampw-marks", "aria-hidden": "true" });
    const fieldId = uid();
    const field = h("input", {
      type: "text", id: fieldId, inputmode: "numeric", autocomplete: "off", spellcheck: "false", title: say("A step to go to; Enter goes there"),
      onchange: () => commit(),
      onkeydown: (event) => {
        if (event.key === "Escape") field.value = field.dataset.drawn;
        if (event.key === "Enter" && !event.shiftKey && !event.ctrlKey && !event.metaKey && !event.altKey) {
          event.preventDefault();
          commit();
        }
        const by = { ArrowUp: 1, ArrowDown: -1 }[event.key];
        if (by && !event.altKey && !event.ctrlKey && !event.metaKey) {
          event.preventDefault();
          seek(Math.min(Math.max(shownStep() + by, model.get("first")), model.get("last")));
        }
      },
    });
    let typed = null; // and asked for: once that is answered, the field shows where that has led to
    const commit = () => {
      if (field.value === field.dataset.drawn) return;
      typed = field.value;
      asked.ask({ typed });
    };
    const last = h("span", { class: "ampw-dim" });
    const sentence = h("p", { class: "ampw-sentence" });
    const nothing = h("p", { class: "ampw-sentence", role: "status" }, say("No step was recorded."));
    body.append(
      h("div", { class: "ampw-choices" }, group,
        h("span", { class: "ampw-choice" }, h("label", { for: speedId }, say("Speed")), speed),
        h("span", { class: "ampw-choice ampw-step" }, h("label", { for: fieldId }, say("Step")), field, last),
        follow),
      h("div", { class: "ampw-slide" }, slider, marks), nothing, sentence);

    const shownStep = () => (wanted !== null ? wanted : asked.value("step", model.get("step")));
    const showStep = (step) => {
      if (Number(slider.value) !== step) slider.value = step;
      slider.style.setProperty("--ampw-done", `${100 * placeOf(step)}%`);
      slider.setAttribute("aria-valuetext", say("step {step} of {last}, {time}", { step: step.toLocaleString("en"), last: model.get("last").toLocaleString("en"), time: model.get("time") }));
      const answered = field.value === typed && !asked.waits();
      if (answered) typed = null;
      const editing = field.matches(":focus") && field.value !== field.dataset.drawn && !answered;
      const text = step < 0 ? "" : String(step);
      if (!editing) field.value = text;
      field.dataset.drawn = text;
    };
    const placeOf = (step) => (step - model.get("first")) / Math.max(model.get("last") - model.get("first"), 1);

    let drawn = "";
    const drawMarks = () => {
      const key = JSON.stringify([model.get("marks"), model.get("first"), model.get("last")]);
      if (key === drawn) return;
      drawn = key;
      const inside = model.get("marks").filter(([step]) => step >= model.get("first") && step <= model.get("last"));
      marks.replaceChildren(...inside.map(([step, label]) => {
        const mark = h("i", { title: say("step {step}: {what}", { step: step.toLocaleString("en"), what: label }), onclick: () => seek(step) });
        mark.style.left = `${100 * placeOf(step)}%`;
        return mark;
      }));
    };

    const draw = () => {
      if (wanted !== null && !asked.waits()) {
        const step = wanted;
        wanted = null;
        asked.ask({ step }, { step }); // draws
        return;
      }
      const locked = asked.locked();
      const empty = model.get("last") < 0;
      const on = playing();
      const play = buttons.get("play");
      if (play.dataset.on !== String(on)) {
        play.dataset.on = String(on);
        play.replaceChildren(shapeIcon(on ? PAUSE_ICON : MOVES[2][2]));
        play.title = on ? say("Pause") : say("Play");
        play.setAttribute("aria-label", play.title);
      }
      const atBegin = model.get("step") <= model.get("first");
      setOff(play, locked || empty);
      for (const move of ["begin", "before"]) setOff(buttons.get(move), locked || empty || atBegin);
      for (const move of ["after", "end"]) setOff(buttons.get(move), locked || empty || (model.get("at_end") && move === "after"));
      setOff(follow, locked);
      const follows = asked.value("mode", model.get("mode")) === "following";
      follow.setAttribute("aria-pressed", String(follows));
      slider.min = model.get("first");
      slider.max = Math.max(model.get("last"), model.get("first"));
      slider.disabled = field.disabled = speed.disabled = locked || empty;
      speed.value = String(asked.value("speed", model.get("speed")));
      if (wanted === null) showStep(shownStep());
      setText(last, empty ? "" : say("of {last}", { last: model.get("last").toLocaleString("en") }));
      setText(time, empty ? "" : model.get("time"));
      setText(sentence, model.get("sentence"));
      nothing.hidden = !empty;
      drawMarks();
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

function shapeIcon(path) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("aria-hidden", "true");
  const shape = document.createElementNS("http://www.w3.org/2000/svg", "path");
  shape.setAttribute("d", path);
  svg.append(shape);
  return svg;
}
