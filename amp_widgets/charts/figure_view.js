// The page's side of FigureView (figure_view.py): draws what `figure` describes, in the page's theme and as wide as its place.

const CONFIG = { displaylogo: false, responsive: false, showTips: false, plotlyServerURL: "", locale: PLOTLY_LOCALE };
const LEGEND_PX = 24; // of one line: so much room for it every figure has
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
      this.tell(say("The figure cannot be shown: {error}", { error }));
    }
    this.planned = false;
    if (this.wanted) this.schedule();
  }

  async drawNow() {
    const figure = this.model.get("figure");
    this.root.setAttribute("aria-label", this.model.get("label"));
    const empty = !figure.data;
    this.plot.hidden = empty;
    this.tell(empty ? this.model.get("note") : this.plotly ? "" : say("Loading the figure …"));
    this.width = Math.floor(this.root.clientWidth);
    const width = Math.floor(this.width / typeScale());
    if (empty || width < 50) return; // out of sight; when it comes into sight its width changes, and it is drawn
    this.plotly ??= await loadedPlotly(this.model);
    if (this.ended.signal.aborted) return;
    this.tell("");
    const { data, layout } = structuredClone({ data: figure.data, layout: figure.layout });
    if (isDark()) for (const [path, value] of figure.dark) put({ data, layout }, path, value);
    const described = layout.paper_bgcolor;
    const { background } = takePageColours(data, layout, this.root, this.plot);
    for (const note of layout.annotations ?? []) if (note.bgcolor === described) note.bgcolor = background;
    layout.width = width;
    layout.modebar.remove = [...new Set([...(layout.modebar.remove ?? []), UPLOAD])];
    if (this.shown !== figure) this.revision = (this.revision ?? 0) + 1;
    this.shown = figure;
    layout.uirevision ??= `figure ${this.revision}`; // a figure that is renewed by itself says where a zoom is to stay
    this.described = { height: layout.height, top: layout.margin?.t ?? 0, notes: structuredClone(layout.annotations ?? []) };
    this.own = figure.own; // one of the user's: laid out as Plotly does it
    if (!this.own) {
      layout.margin = { ...layout.margin, autoexpand: false }; // the room that Plotly makes for a legend, it does not take back
      this.makeRoom(layout, this.legendPx ?? LEGEND_PX);
    }
    this.arranging = true;
    try {
      await this.plotly.react(this.plot, data, layout, CONFIG);
      if (!this.listens) this.plot.on("plotly_relayout", () => this.arrange());
      this.listens = true;
      magnify(this.plot, width, this.plot._fullLayout.height);
    } finally {
      this.arranging = false;
    }
    await this.arrange();
    this.draws += 1;
    this.root.dataset.draws = this.draws;
  }

  // The legend above the plot has as many lines as the width asks for, and the figure is as much higher.
  makeRoom(layout, legendPx) {
    const more = Math.max(0, legendPx - LEGEND_PX);
    layout.height = this.described.height && this.described.height + more;
    layout.margin.t = this.described.top + more;
  }

  // After each drawing and each zoom: room for the legend, and notes with an arrow where they are read.
  async arrange() {
    if (this.arranging || this.own || this.ended.signal.aborted) return;
    this.arranging = true;
    try {
      const { legend, height } = this.plot._fullLayout;
      const above = legend?.orientation === "h" && legend.yanchor === "bottom" && legend.y === 1;
      const legendPx = above ? (this.plot.querySelector(".infolayer .legend")?.getBBox().height ?? 0) : 0;
      if (above && Math.abs(legendPx - (this.legendPx ?? LEGEND_PX)) > 2) {
        this.legendPx = legendPx;
        const room = { height, margin: {} };
        this.makeRoom(room, legendPx);
        await this.plotly.relayout(this.plot, { height: room.height, "margin.t": room.margin.t });
        magnify(this.plot, this.plot._fullLayout.width, this.plot._fullLayout.height);
      }
      const moved = placedNotes(this.plot, this.described.notes);
      if (Object.keys(moved).length) await this.plotly.relayout(this.plot, moved);
    } finally {
      this.arranging = false;
    }
  }

  tell(text) {
    this.note.textContent = text;
    this.note.hidden = text === "";
  }
}

/**
 * What is to be changed, so that the notes with an arrow and a text are within the plot, and neither on each other nor on those
 * without an arrow. `described`: the notes as the figure has them, which is tried first.
 */
function placedNotes(plot, described) {
  const { _size: size, xaxis, yaxis, annotations = [] } = plot._fullLayout;
  const within = plot.getBoundingClientRect();
  const scale = typeScale(); // boxes are as they are seen
  const boxOf = (i) => {
    const box = plot.querySelector(`.annotation[data-index="${i}"] .annotation-text-g .bg`)?.getBoundingClientRect();
    const [left, top] = [(box?.left - within.left) / scale - size.l, (box?.top - within.top) / scale - size.t];
    return box?.width && { left, top, width: box.width / scale, height: box.height / scale };
  };
  const hasArrow = (note) => note.showarrow && note.text?.trim() && note.axref === "pixel";
  const taken = annotations.map((note, i) => !hasArrow(note) && note.text?.trim() && note.text !== "<b>✕</b>" && boxOf(i)).filter(Boolean);
  const tips = annotations.map((note, i) => hasArrow(note) && described[i] && [xaxis.l2p(note.x), yaxis.l2p(note.y)]);
  const arrows = []; // from a tip to its note, as points
  const moved = {};
  annotations.forEach((note, i) => {
    if (!hasArrow(note) || !described[i]) return;
    const [x, y, box] = [xaxis.l2p(note.x), yaxis.l2p(note.y), boxOf(i)];
    if (!box || x < 0 || x > size.w) return; // out of sight
    const { width, height } = box;
    const first = described[i];
    const sides = first.xanchor === "right" ? ["right", "left"] : ["left", "right"];
    const tries = [first.ay, -first.ay, -40, 40, -70, 70, -100, 100, -140, 140].flatMap((ay) => sides.map((side) => ({ side, ay })));
    const boxes = tries.map(({ side, ay }) => {
      const ax = side === "right" ? -Math.abs(first.ax) : Math.abs(first.ax);
      const left = clamp(x + ax - (side === "right" ? width : 0), 0, size.w - width);
      return { side, left, top: clamp(y + ay - height / 2, 0, size.h - height), width, height, wanted: [x + ax, y + ay] };
    });
    const cost = (one) => {
      const [x0, y0] = one.wanted;
      const shifted = Math.abs(one.left - (one.side === "right" ? x0 - width : x0)) + Math.abs(one.top + height / 2 - y0);
      const hides = tips.filter((tip) => tip && distance(one, tip) < 2).length;
      const arrow = arrowTo(one, [x, y]);
      const crosses = arrow.filter((point) => taken.some((other) => distance(other, point) < 2)).length;
      const covers = arrows.flat().filter((point) => distance(one, point) < 2).length;
      const short = Math.max(0, LEAST_ARROW_PX - distance(one, [x, y])); // its head alone is hardly seen
      const on = taken.reduce((sum, other) => sum + overlap(grown(one), other), 0);
      return on * 10 + 5000 * hides + 300 * (crosses + covers) + 50 * short + shifted;
    };
    const best = boxes.reduce((kept, one) => (cost(one) < cost(kept) ? one : kept));
    taken.push(best);
    arrows.push(arrowTo(best, [x, y]));
    const ax = best.left + (best.side === "right" ? width : 0) - x;
    const ay = best.top + height / 2 - y;
    const put = { ax, ay, xanchor: best.side, align: best.side };
    for (const [key, value] of Object.entries(put)) {
      const has = annotations[i][key];
      if (typeof value === "number" ? Math.abs(value - has) > 1 : value !== has) moved[`annotations[${i}].${key}`] = value;
    }
  });
  return moved;
}

const LEAST_ARROW_PX = 14;
const GAP_PX = 6;

/** The box with the room around it that keeps it apart from another. */
function grown({ left, top, width, height }) {
  return { left: left - GAP_PX, top: top - GAP_PX, width: width + 2 * GAP_PX, height: height + 2 * GAP_PX };
}

/** How far a point is from a box. */
function distance({ left, top, width, height }, [x, y]) {
  return Math.hypot(Math.max(left - x, 0, x - left - width), Math.max(top - y, 0, y - top - height));
}

/** Points of the arrow from a note, whose side it leaves as Plotly has it, to its tip. */
function arrowTo(box, [x, y]) {
  const [fromX, fromY] = [box.left + (box.side === "right" ? box.width : 0), box.top + box.height / 2];
  return Array.from({ length: 20 }, (_, i) => [x + ((fromX - x) * i) / 20, y + ((fromY - y) * i) / 20]);
}

function clamp(value, least, most) {
  return Math.max(least, Math.min(value, most));
}

// How many square pixels two boxes share.
function overlap(one, other) {
  const across = Math.min(one.left + one.width, other.left + other.width) - Math.max(one.left, other.left);
  const down = Math.min(one.top + one.height, other.top + other.height) - Math.max(one.top, other.top);
  return across > 0 && down > 0 ? across * down : 0;
}

// Set what is at the end of the path, a list of keys.
function put(into, path, value) {
  for (const key of path.slice(0, -1)) into = into[key];
  into[path.at(-1)] = value;
}
