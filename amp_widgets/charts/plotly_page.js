// What the pages of all charts share; prepended to each.

const LOADED = Symbol.for("amp_widgets.plotly");

// plotly.js, unpacked once a page and version, without touching a Plotly that the page has already.
async function loadedPlotly(model) {
  const manager = model.widget_manager;
  const asset = await manager.get_model(String(model.get("asset")).replace("IPY_MODEL_", ""));
  const loaded = (globalThis[LOADED] ??= new Map());
  const version = asset.get("version");
  if (!loaded.has(version)) {
    const loading = evaluated(asset.get("gzipped"));
    loaded.set(version, loading);
    loading.catch(() => loaded.delete(version));
  }
  return withWords(await loaded.get(version));
}

// What Plotly itself says: its buttons, and what is at the pointer on a legend. In its own English the texts are the keys.
const PLOTLY_WORDS = {
  "Autoscale": say("Autoscale"),
  "Box Select": say("Box Select"),
  "Double-click on legend to isolate one trace": say("Double-click on legend to isolate one trace"),
  "Double-click to zoom back out": say("Double-click to zoom back out"),
  "Download plot": say("Download plot"),
  "Download plot as a PNG": say("Download plot as a PNG"),
  "Lasso Select": say("Lasso Select"),
  "Pan": say("Pan"),
  "Reset axes": say("Reset axes"),
  "Zoom": say("Zoom"),
  "Zoom in": say("Zoom in"),
  "Zoom out": say("Zoom out"),
};
// Another name with other words: the plotly.js of a page is shared by the kernels, and a plot with another locale is drawn anew.
const PLOTLY_LOCALE = `ampw ${say("Zoom in")}`;

function withWords(plotly) {
  plotly.register({ moduleType: "locale", name: PLOTLY_LOCALE, dictionary: PLOTLY_WORDS });
  return plotly;
}

async function evaluated(gzipped) {
  const stream = new Blob([gzipped]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = await new Response(stream).text();
  // Its own `define`, `module` and `window.Plotly` would be the page's.
  const before = "const module = undefined, exports = undefined, define = undefined;\n";
  const url = URL.createObjectURL(new Blob([before, script, "\nexport default globalThis.Plotly;"], { type: "text/javascript" }));
  const had = Object.getOwnPropertyDescriptor(globalThis, "Plotly");
  try {
    return (await import(url)).default;
  } finally {
    URL.revokeObjectURL(url);
    if (had) Object.defineProperty(globalThis, "Plotly", had);
    else delete globalThis.Plotly;
  }
}

// What presenting_control.js has put on <html>; without it the notebook's own theme and the usual size.
const TYPE_SIZES = { large: 1.3, "very-large": 1.7 };

function typeScale() {
  return TYPE_SIZES[document.documentElement.dataset.ampType] ?? 1;
}

// Windows' high contrast: the system's colours, which themes.css hands on.
function isForced() {
  return matchMedia("(forced-colors: active)").matches;
}

function isHighContrast() {
  const { dataset } = document.documentElement;
  if (isForced()) return true;
  const theme = dataset.ampTheme ?? document.documentElement.getAttribute("theme"); // the latter on an exported page
  return theme === "high-contrast" || (!theme && matchMedia("(prefers-contrast: more)").matches);
}

function isDark() {
  if (isForced()) return matchMedia("(prefers-color-scheme: dark)").matches; // by the system's background, as browsers have it
  const { body, documentElement } = document;
  const chosen = documentElement.dataset.ampTheme;
  if (chosen === "light" || chosen === "dark") return chosen === "dark";
  if (body.dataset.jpThemeLight) return body.dataset.jpThemeLight === "false"; // JupyterLab, Notebook
  if (body.dataset.vscodeThemeKind) return body.dataset.vscodeThemeKind.includes("dark"); // VS Code
  if (chosen) return false; // as themes.css has it
  const theme = documentElement.getAttribute("theme"); // Colab's, and an exported page's
  if (theme !== null && theme !== "high-contrast") return theme === "dark";
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

// Call when the theme or the size of type changes, until `signal` says so. JupyterLab swaps its style sheet about when it changes
// these attributes, so it is called again a little later.
function watchTheme(changed, signal) {
  const observer = new MutationObserver(() => [0, 200, 1000].forEach((ms) => setTimeout(changed, ms)));
  const attributes = {
    attributes: true,
    attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class", "theme", "data-amp-theme", "data-amp-type"],
  };
  observer.observe(document.body, attributes);
  observer.observe(document.documentElement, attributes);
  for (const query of ["(prefers-color-scheme: dark)", "(prefers-contrast: more)", "(forced-colors: active)"]) {
    matchMedia(query).addEventListener("change", changed, { signal });
  }
  signal.addEventListener("abort", () => observer.disconnect());
}

// The page's own colours in place of the layout's: background, text, and the tools beside the plot (see live.css). With high
// contrast all text has the one of text, and lines are wider.
function takePageColours(data, layout, root, plot) {
  const style = getComputedStyle(root);
  const of = (name, fallback) => style.getPropertyValue(name).trim() || fallback;
  // then the variables say one for each of light and dark, or a name of the system's
  const chosen = document.documentElement.dataset.ampTheme !== undefined || isForced();
  const background = chosen ? style.backgroundColor : of("--jp-layout-color0", layout.paper_bgcolor);
  const text = chosen || isHighContrast() ? style.color : of("--jp-ui-font-color1", layout.font.color);
  Object.assign(layout, { paper_bgcolor: background, plot_bgcolor: background });
  layout.font.color = text;
  layout.modebar.activecolor = text;
  layout.hoverlabel.bgcolor = background;
  layout.hoverlabel.font.color = text;
  if (isHighContrast()) strengthen(data, layout, text);
  plot.style.setProperty("--amp-chart-tool", layout.modebar.color);
  plot.style.setProperty("--amp-chart-active-tool", text);
  return { background, text };
}

const FAINT = { gridcolor: "#808080", linecolor: "", spikecolor: "", bordercolor: "", arrowcolor: "" };

function strengthen(data, layout, text) {
  const walk = (part) => {
    for (const [name, value] of Object.entries(part)) {
      if (name in FAINT) part[name] = FAINT[name] || text;
      else if (value !== null && typeof value === "object") walk(value);
    }
    if (part.font?.color) part.font.color = text;
  };
  walk(layout);
  layout.modebar.color = text;
  for (const shape of layout.shapes ?? []) if (shape.type === "line") shape.line = { ...shape.line, color: text };
  for (const trace of data) {
    if (trace.line?.width) trace.line = { ...trace.line, width: 1.6 * trace.line.width };
    if (trace.textfont) trace.textfont = { ...trace.textfont, color: text };
  }
}

// The plot as large as the type is: drawn for so much less width, and magnified.
function magnify(plot, width, height) {
  const scale = typeScale();
  const changed = plot.style.transform !== (scale === 1 ? "" : `scale(${scale})`);
  plot.style.transform = scale === 1 ? "" : `scale(${scale})`;
  plot.style.transformOrigin = "0 0";
  plot.style.width = scale === 1 ? "" : `${width}px`;
  plot.style.marginBottom = scale === 1 ? "" : `${height * (scale - 1)}px`;
  return changed;
}
