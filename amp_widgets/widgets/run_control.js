const RUN_COMMANDS = [
  ["start", say("Start"), "M4 2.5v11l9-5.5z"],
  ["pause", say("Pause"), "M4 3h3v10H4zM9 3h3v10H9z"],
  ["resume", say("Resume"), "M3 3h2v10H3zM7 3v10l7-5z"],
  ["single_step", say("Single step"), "M3 3v10l7-5zM11 3h2v10h-2z"],
  ["stop", say("Stop"), "M3.5 3.5h9v9h-9z"],
  ["reset", say("Reset"), "M8 3V0.8L4.2 4 8 7.2V5a3.5 3.5 0 1 1-3.5 3.5h-2A5.500 5.500 0 1 0 8 3z"],
];
const RUN_TITLES = { reset: say("Reset to the first weights"), single_step: say("Run one step, then pause") };

export default {
  render({ model, el }) {
    const { body, showLost, remove } = frame(el, say("Run"), "ampw-run");
    const sentence = h("p", { class: "ampw-sentence" });
    const group = h("div", { class: "ampw-buttons", role: "group", "aria-label": say("Run") });
    const buttons = new Map();
    for (const [command, label, path] of RUN_COMMANDS) {
      const title = RUN_TITLES[command];
      const button = h("button", { type: "button", title, onclick: () => press(command) }, icon(path), h("span", {}, label));
      buttons.set(command, button);
      group.append(button);
    }
    body.append(sentence, group);

    let place = null; // a button that had the focus when it was disabled, which takes the focus from it
    const keepPlace = () => {
      if (!place) return;
      const next = place.disabled ? [...buttons.values()].find((button) => !button.disabled) : place;
      if (document.activeElement === document.body || document.activeElement === place) next?.focus();
      place = null;
    };

    let pressed = null; // a second press of it, until the first is answered, was meant for what is no more
    const press = (command) => {
      if (pressed === command && asked.waits()) return;
      pressed = command;
      asked.ask({ command });
    };

    let shown = null;
    const draw = () => {
      const enabled = asked.locked() ? [] : model.get("enabled");
      const focused = [...buttons.values()].find((button) => button.matches(":focus"));
      if (shown !== model.get("enabled")) pressed = null;
      shown = model.get("enabled");
      for (const [command, button] of buttons) {
        button.disabled = !enabled.includes(command);
        button.setAttribute("aria-disabled", String(button.disabled || (pressed === command && asked.waits()))); // keeps the focus
      }
      if (focused?.disabled) {
        place = focused;
        setTimeout(keepPlace, 600); // a single step disables its button only for a moment
      } else if (place && !place.disabled) keepPlace();
      setText(sentence, model.get("sentence"));
      group.hidden = model.get("sentence") !== "";
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

function icon(path) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("aria-hidden", "true");
  const shape = document.createElementNS("http://www.w3.org/2000/svg", "path");
  shape.setAttribute("d", path);
  svg.append(shape);
  return svg;
}
