// Draws what a page without scripts is to show: Plotly's figures as pictures, widgets as the elements that they make.

async function chart(figure, format, size) {
  const layout = { ...figure.layout, width: size.width, height: size.height, paper_bgcolor: "#fff", plot_bgcolor: "#fff" };
  layout.font = { color: "#212121", ...layout.font, family: "system-ui, sans-serif" };
  const url = await Plotly.toImage({ data: figure.data, layout }, { format, ...size });
  return format === "svg" ? decodeURIComponent(url.slice(url.indexOf(",") + 1)) : url;
}

async function controls(models) {
  const drawn = [];
  for (const state of models) {
    const url = URL.createObjectURL(new Blob([state._esm], { type: "text/javascript" }));
    const { default: widget } = await import(url);
    URL.revokeObjectURL(url);
    const el = document.createElement("div");
    document.body.append(el);
    // What a widget may ask of its model. Nobody answers what it sends.
    const model = { get: (name) => state[name], set() {}, save_changes() {}, on() {}, off() {}, send() {} };
    const remove = await widget.render({ model, el });
    await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
    keepAsAttributes(el);
    drawn.push(el.outerHTML);
    await remove?.();
    el.remove();
  }
  return drawn;
}

/** What is set only as a property is lost when elements become text; and nothing is to be changed where nobody listens. */
function keepAsAttributes(el) {
  for (const input of el.querySelectorAll("input")) {
    input.setAttribute("value", input.value);
    input.toggleAttribute("checked", input.checked);
  }
  for (const option of el.querySelectorAll("option")) option.toggleAttribute("selected", option.selected);
  for (const part of el.querySelectorAll("input, select, textarea, button")) {
    part.disabled = true;
    part.removeAttribute("aria-disabled");
  }
  for (const live of el.querySelectorAll("[role=status], [role=alert]")) live.removeAttribute("role");
  for (const part of el.querySelectorAll("[data-lm-suppress-shortcuts]")) delete part.dataset.lmSuppressShortcuts;
}
