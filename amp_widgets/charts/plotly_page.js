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
  return loaded.get(version);
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

function isDark() {
  const { body, documentElement } = document;
  if (body.dataset.jpThemeLight) return body.dataset.jpThemeLight === "false"; // JupyterLab, Notebook
  if (body.dataset.vscodeThemeKind) return body.dataset.vscodeThemeKind.includes("dark"); // VS Code
  if (documentElement.hasAttribute("theme")) return documentElement.getAttribute("theme") === "dark"; // Colab
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

// Call when the theme changes, until `signal` says so. JupyterLab swaps its style sheet about when it changes these attributes, so
// it is called again a little later.
function watchTheme(changed, signal) {
  const observer = new MutationObserver(() => [0, 200, 1000].forEach((ms) => setTimeout(changed, ms)));
  const attributes = { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class", "theme"] };
  observer.observe(document.body, attributes);
  observer.observe(document.documentElement, attributes);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed, { signal });
  signal.addEventListener("abort", () => observer.disconnect());
}

// The page's own colours in place of the layout's: background, text, and the tools beside the plot (see live.css).
function takePageColours(layout, root, plot) {
  const style = getComputedStyle(root);
  const of = (name, fallback) => style.getPropertyValue(name).trim() || fallback;
  const background = of("--jp-layout-color0", layout.paper_bgcolor);
  const text = of("--jp-ui-font-color1", layout.font.color);
  Object.assign(layout, { paper_bgcolor: background, plot_bgcolor: background });
  layout.font.color = text;
  layout.modebar.activecolor = text;
  plot.style.setProperty("--amp-chart-tool", layout.modebar.color);
  plot.style.setProperty("--amp-chart-active-tool", text);
  layout.hoverlabel.bgcolor = background;
  layout.hoverlabel.font.color = text;
  return { background, text };
}
