// The page's side of FigureView (figure_view.py): draws what `figure` describes, in the page's theme and as wide as its place.

const CONFIG = { displaylogo: false, responsive: false, showTips: false, plotlyServerURL: "" };
const UPLOAD = "sendChartToCloud"; // would send all data of the figure to Plotly's server

export default {
  render({ model, el }) {
    const view = new FigurePage(model, el);
    return () => view.close();
  },
};

class FigurePage {
  constructor(model, el) {
    this.model = model;
    this.root = document.createElement("div");
    this.root.className = "amp-figure";
    this.root.setAttribute("role", "figure");
    this.note = document.createElement("p");
    this.note.className = "amp-figure-note";
    this.plot = document.createElement("div");
    this.plot.className = "amp-chart-plot";
    this.root.append(this.note, this.plot);
    el.append(this.root);
    this.draws = 0;
    this.shown = null; // what is drawn, and where the user has zoomed to in it
    this.ended = new AbortController();
    const { signal } = this.ended;
    const redraw = () => this.schedule();
    const size = new ResizeObserver(() => Math.floor(this.root.clientWidth) !== this.width && this.schedule());
    size.observe(this.root);
    watchTheme(redraw, signal);
    model.on("change", redraw);
    signal.addEventListener("abort", () => {
      size.disconnect();
      model.off("change", redraw);
    });
    this.schedule();
  }

  close() {
    this.ended.abort();
    cancelAnimationFrame(this.frame);
    this.plotly?.purge(this.plot);
    this.root.remove();
  }

  schedule() {
    this.wanted = true;
    if (this.planned || this.ended.signal.aborted) return;
    this.planned = true;
    this.frame = requestAnimationFrame(() => this.draw());
  }

  // One at a time; what changes meanwhile is drawn next.
  async draw() {
    this.wanted = false;
    try {
      await this.drawNow();
    } catch (error) {
      console.error("amp_widgets: the figure could not be drawn", error);
      this.say(`The figure cannot be shown: ${error}`);
    }
    this.planned = false;
    if (this.wanted) this.schedule();
  }

  async drawNow() {
    const figure = this.model.get("figure");
    this.root.setAttribute("aria-label", this.model.get("label"));
    const empty = !figure.data;
    this.plot.hidden = empty;
    this.say(empty ? this.model.get("note") : this.plotly ? "" : "Loading the figure …");
    const width = Math.floor(this.root.clientWidth);
    this.width = width;
    if (empty || width < 50) return; // out of sight; when it comes into sight its width changes, and it is drawn
    this.plotly ??= await loadedPlotly(this.model);
    if (this.ended.signal.aborted) return;
    this.say("");
    const { data, layout } = structuredClone({ data: figure.data, layout: figure.layout });
    if (isDark()) for (const [path, value] of figure.dark) put({ data, layout }, path, value);
    const described = layout.paper_bgcolor;
    const { background } = takePageColours(layout, this.root, this.plot);
    for (const note of layout.annotations ?? []) if (note.bgcolor === described) note.bgcolor = background;
    layout.width = width;
    layout.modebar.remove = [...new Set([...(layout.modebar.remove ?? []), UPLOAD])];
    if (this.shown !== figure) this.revision = (this.revision ?? 0) + 1;
    this.shown = figure;
    layout.uirevision = `figure ${this.revision}`;
    await this.plotly.react(this.plot, data, layout, CONFIG);
    this.draws += 1;
    this.root.dataset.draws = this.draws;
  }

  say(text) {
    this.note.textContent = text;
    this.note.hidden = text === "";
  }
}

// Set what is at the end of the path, a list of keys.
function put(into, path, value) {
  for (const key of path.slice(0, -1)) into = into[key];
  into[path.at(-1)] = value;
}
