// Shared by all controls; prepended to each. Everything shown is made of elements and text nodes: markup in data stays text.

const NO_KERNEL = say("no kernel: run the cell again");
const LOST = "amp-widgets-lost";

/** An element with attributes, listeners ("onclick": function) and children; a string child becomes text. */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Set a text only where it differs, so that a selection in it survives. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
  element.hidden = text === "";
}

/**
 * Switch a button off or on. One that is off keeps the focus, where `disabled` would throw it to the beginning of the page; its
 * presses are ignored by `ignoreOff`.
 */
function setOff(button, off) {
  if (isOff(button) !== off) button.setAttribute("aria-disabled", String(off));
}

function isOff(button) {
  return button.getAttribute("aria-disabled") === "true";
}

/** Presses of what is off go nowhere; for the capturing phase. */
function ignoreOff(event) {
  const button = event.target.closest("button");
  if (button !== null && isOff(button)) event.stopImmediatePropagation();
}

function uid() {
  return "amp-" + Math.random().toString(36).slice(2, 11);
}

/** The frame of a control: a titled section, or a bare one. Returns its parts and what removes its listeners. */
function frame(el, title, className) {
  el.classList.add("ampw");
  const titleId = uid();
  let lost = false;
  const chip = h("span", { class: "ampw-chip", title: say("In force from the next step"), hidden: true }, say("waiting"));
  const body = h("div", { class: "ampw-body" });
  const heading = h("div", { class: "ampw-heading" }, h("h3", { id: titleId }, title), chip);
  const section = h("section", { class: `ampw-panel ${className}`, "aria-labelledby": titleId }, heading, body);
  el.append(section);
  el.addEventListener("keydown", keepEscape);
  el.addEventListener("click", ignoreOff, true);
  return {
    body,
    heading,
    titleId,
    setWaiting: (waits) => { chip.hidden = !waits && !lost; },
    showLost: () => {
      lost = true;
      chip.textContent = NO_KERNEL;
      chip.title = say("The kernel of this view was restarted or has ended");
      chip.hidden = false;
    },
    remove: keepKeys(el),
  };
}

/**
 * Keep the notebook's one-key shortcuts (arrows select cells, x cuts one) away from the keys typed in `el`, while those with a
 * modifier and Shift+Enter still reach it. JupyterLab looks for the attribute, on the element that has the focus, when the event
 * reaches the document; the window comes before.
 */
function keepKeys(el) {
  const listener = (event) => {
    if (!el.contains(event.target)) return;
    const theirs = event.ctrlKey || event.metaKey || event.altKey || (event.shiftKey && event.key === "Enter");
    if (theirs) delete event.target.dataset.lmSuppressShortcuts;
    else event.target.dataset.lmSuppressShortcuts = "true";
  };
  window.addEventListener("keydown", listener, true);
  return () => window.removeEventListener("keydown", listener, true);
}

/** Escape in a field of text is for the field: the notebook would take the focus from it. */
function keepEscape(event) {
  if (event.key === "Escape" && event.target.matches('input[type="text"]')) event.stopPropagation();
}

/**
 * Whether the kernel behind a view is gone. The first part of a dashboard to find out, because a message could not be sent, tells
 * the others; each then calls its `draw`.
 */
function watchKernel(model, el, draw) {
  let lost = false;
  const dashboard = () => el.closest(".ampw-dashboard") ?? el;
  const takeLoss = (event) => {
    if (lost || event.detail !== dashboard()) return;
    lost = true;
    draw();
  };
  document.addEventListener(LOST, takeLoss);
  const lose = () => document.dispatchEvent(new CustomEvent(LOST, { detail: dashboard() }));
  return {
    lost: () => lost,
    lose,
    remove: () => document.removeEventListener(LOST, takeLoss),
    /** Send; whether it could be. */
    send(message) {
      try {
        if (lost) return false;
        model.send(message);
        return true;
      } catch (error) {
        console.debug("amp_widgets: the kernel cannot be reached", error);
        lose();
        return false;
      }
    },
  };
}

/** What the user asked for in this view, shown until Python answers: in a busy kernel that can take a while. */
function asking(model, el, showLost, draw) {
  let asked = {};
  let latest = null;
  const kernel = watchKernel(model, el, () => {
    asked = {};
    latest = null;
    showLost();
    draw();
  });
  model.on("msg:custom", (message) => {
    if (latest === null || message.answered !== latest) return;
    asked = {};
    latest = null;
    draw();
  });
  return {
    waits: () => latest !== null,
    locked: () => model.get("locked") || kernel.lost(),
    whyLocked: () => (kernel.lost() ? NO_KERNEL : model.get("locked") ? model.get("why_locked") : ""),
    remove: kernel.remove,
    value: (name, otherwise) => (name in asked ? asked[name] : otherwise),
    ask(message, shown = {}) {
      const id = uid();
      if (!kernel.send({ ...message, id })) return;
      Object.assign(asked, shown);
      latest = id;
      draw();
    },
  };
}
