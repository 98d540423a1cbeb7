// The page's side of TrainingChart (live.py). It holds the same bounded data as page_data.py and draws them: at most once in an
// animation frame, at most ten times a second, and less often when drawing is slow. Python describes how everything looks
// (`spec`); here is what depends on the page: its width, its theme, where the user has zoomed to.

const FASTEST_MS = 100;
const UNSEEN_ANSWER_MS = 1000;
const ZOOM_REST_MS = 150;
const NARROWEST_GAP_PX = 1.5;
const MARK_PX = 6;
const CONFIG = { displaylogo: false, responsive: false, showTips: false, plotlyServerURL: "", locale: PLOTLY_LOCALE };

export default () => {
  let run;
  return {
    initialize({ model }) {
      run = new Run(model);
    },
    render({ model, el }) {
      const view = new View(model, run, el);
      return () => view.close();
    },
  };
};

// What the page knows of the run; all views of a chart share it.
class Run {
  constructor(model) {
    this.model = model;
    this.views = new Set();
    this.answered = 0;
    this.clear();
    this.sequence = 0;
    const full = model.get("full");
    if (full?.head) this.take(full.head, full.data);
    model.on("msg:custom", (head, buffers) => this.receive(head, buffers[0]));
  }

  clear() {
    this.series = Object.fromEntries(this.model.get("spec").series.map((name) => [name, new Points()]));
    this.events = [];
  }

  receive(head, data) {
    if (head.type === "detail") {
      for (const view of this.views) if (view.id === head.view) view.takeDetail(head, data);
      return;
    }
    if (head.sequence <= this.sequence) return; // the state that this page started from has it
    if (head.type === "append" && head.sequence !== this.sequence + 1) tell(this.model, { type: "missed" });
    this.take(head, data);
    for (const view of this.views) {
      if (head.type === "whole") view.refreshDetail();
      view.schedule();
    }
    this.unseen ??= setTimeout(() => this.answerUnseen(), UNSEEN_ANSWER_MS);
  }

  // A chart that is out of sight is not drawn, but its page is there.
  answerUnseen() {
    this.unseen = undefined;
    const drawing = document.visibilityState === "visible" && [...this.views].some((view) => view.seen);
    if (this.views.size && !drawing) this.answer(this.sequence);
  }

  take(head, data) {
    if (head.type !== "append") this.clear();
    for (const [name, [x, y]] of unpacked(this.model, head, data)) this.series[name].append(x, y);
    this.events.push(...head.events);
    this.sequence = head.sequence;
    this.lastStep = head.last_step;
    this.skipped = head.skipped;
    this.exactFrom = head.exact_from ?? -Infinity;
  }

  answer(sequence) {
    if (sequence <= this.answered) return;
    this.answered = sequence;
    tell(this.model, { type: "drawn", sequence });
  }
}

// A growing line.
class Points {
  constructor() {
    this.size = 0;
    this.xs = new Float64Array(256);
    this.ys = new Float64Array(256);
  }

  append(x, y) {
    const end = this.size + x.length;
    if (end > this.xs.length) {
      this.xs = grown(this.xs, Math.max(end, 2 * this.xs.length));
      this.ys = grown(this.ys, this.xs.length);
    }
    this.xs.set(x, this.size);
    this.ys.set(y, this.size);
    this.size = end;
  }

  get x() {
    return this.xs.subarray(0, this.size);
  }

  get y() {
    return this.ys.subarray(0, this.size);
  }
}

class View {
  constructor(model, run, el) {
    this.model = model;
    this.run = run;
    this.id = crypto.randomUUID?.() ?? String(Math.random());
    this.follow = true;
    this.follows = 0; // how often follow was asked for: a change lets go of the user's zoom
    this.logLoss = false;
    this.detail = null;
    this.requests = 0;
    this.draws = 0;
    this.costMs = 0;
    this.seen = true;
    this.build(el);
    this.watch();
    run.views.add(this);
    this.load();
  }

  build(el) {
    this.root = element("div", "amp-chart");
    this.root.setAttribute("role", "group");
    this.root.setAttribute("aria-label", say("Training charts: nothing recorded yet"));
    const bar = element("div", "amp-chart-bar");
    this.followButton = button(say("Follow"), say("Show the whole run and keep up with its newest step"), () => this.startFollowing());
    this.logButton = button(say("Log loss"), say("Show the loss on a logarithmic axis"), () => this.toggleLog());
    this.stateText = element("span", "amp-chart-state");
    bar.append(this.followButton, this.logButton, this.stateText);
    this.plot = element("div", "amp-chart-plot");
    this.plot.style.minHeight = `${this.spec.themes.light.layout.height}px`;
    this.plot.textContent = say("Loading the charts …");
    this.root.append(bar, this.plot);
    el.append(this.root);
    this.showButtons();
  }

  watch() {
    this.ended = new AbortController();
    const { signal } = this.ended;
    const redraw = () => this.schedule();
    const size = new ResizeObserver(redraw);
    size.observe(this.root);
    const sight = new IntersectionObserver((entries) => {
      this.seen = entries.at(-1).isIntersecting;
      if (this.seen) this.schedule();
    });
    sight.observe(this.root);
    watchTheme(redraw, signal);
    // A redraw in the middle of a drag would end it. The end of a press that opens a menu may never be told.
    this.plot.addEventListener("pointerdown", (event) => (this.held = event.button === 0), { signal, capture: true });
    for (const type of ["pointerup", "pointercancel"]) {
      addEventListener(type, () => this.held && ((this.held = false), this.schedule()), { signal, capture: true });
    }
    // Keep the notebook's one-key shortcuts (x cuts a cell) away from the keys typed on a button in here, while those with a modifier
    // and Shift+Enter still reach it. JupyterLab looks for the attribute, on the element that has the focus, when the event reaches
    // the document; the window comes before.
    const keepKeys = (event) => {
      if (!this.root.contains(event.target)) return;
      const theirs = event.ctrlKey || event.metaKey || event.altKey || (event.shiftKey && event.key === "Enter");
      if (theirs) delete event.target.dataset.lmSuppressShortcuts;
      else event.target.dataset.lmSuppressShortcuts = "true";
    };
    addEventListener("keydown", keepKeys, { signal, capture: true });
    const respec = () => this.schedule();
    this.model.on("change:spec", respec);
    signal.addEventListener("abort", () => {
      for (const observer of [size, sight]) observer.disconnect();
      this.model.off("change:spec", respec);
    });
  }

  async load() {
    try {
      this.plotly = await loadedPlotly(this.model);
    } catch (error) {
      console.error(error);
      this.plot.textContent = say("The charts cannot be shown: {error}", { error });
      return;
    }
    if (this.ended.signal.aborted) return;
    this.plot.textContent = "";
    this.schedule();
  }

  close() {
    this.ended.abort();
    clearTimeout(this.timer);
    clearTimeout(this.rest);
    cancelAnimationFrame(this.frame);
    this.run.views.delete(this);
    this.plotly?.purge(this.plot);
    this.root.remove();
  }

  get spec() {
    return this.model.get("spec");
  }

  schedule() {
    this.wanted = true;
    if (!this.plotly || this.planned || this.ended.signal.aborted) return;
    this.planned = true;
    const rest = Math.max(FASTEST_MS, 2 * this.costMs) - (performance.now() - (this.startedMs ?? -Infinity));
    this.timer = setTimeout(() => (this.frame = requestAnimationFrame(() => this.draw())), Math.max(0, rest));
  }

  async draw() {
    this.planned = false;
    const width = Math.floor(this.root.clientWidth / typeScale());
    if (!this.wanted || this.held || !this.seen || width < 50) return; // each of them schedules again when it ends
    this.wanted = false;
    this.planned = true; // one at a time
    this.startedMs = performance.now();
    const sequence = this.run.sequence;
    try {
      const { traces, layout } = this.picture(width);
      await this.plotly.react(this.plot, traces, layout, CONFIG);
      if (this.ended.signal.aborted) return;
      this.plot.style.minHeight = "";
      magnify(this.plot, width, layout.height);
      if (!this.draws) this.plot.on("plotly_relayout", (change) => this.moved(change));
      this.draws += 1;
      this.root.dataset.draws = this.draws;
      this.describe();
    } catch (error) {
      console.error("amp_widgets: the chart could not be drawn", error);
    }
    this.costMs = performance.now() - this.startedMs;
    this.root.dataset.drawMs = this.costMs.toFixed(1);
    this.planned = false;
    this.run.answer(sequence);
    if (this.wanted) this.schedule();
  }

  picture(width) {
    const theme = this.spec.themes[isDark() ? "dark" : "light"];
    const layout = { ...structuredClone(theme.layout), width };
    const range = this.shownSteps();
    const plotWidth = width - layout.margin.l - layout.margin.r;
    const narrowest = (NARROWEST_GAP_PX * (range[1] - range[0])) / Math.max(plotWidth, 1);
    const lines = {};
    for (const [name, points] of Object.entries(this.run.series)) {
      const { x, y } = this.withDetail(name, points);
      const marks = name === "not_finite" || name === "skipped";
      lines[name] = marks ? slim({ x, y }, range, plotWidth / MARK_PX) : slim(bridged(x, y, narrowest), range, plotWidth);
    }
    const traces = theme.traces.map((trace) => this.filled(trace, lines, range, plotWidth)).filter((trace) => trace.x.length || trace.meta.part === "line"); // a line's axis needs it
    this.setAxes(layout, lines, range);
    this.addFlags(layout, theme, range, plotWidth);
    this.setColours(traces, layout);
    layout.datarevision = this.draws;
    layout.uirevision = `follow ${this.follows}`; // must be truthy
    layout.yaxis.uirevision = `${layout.uirevision} ${this.logLoss}`;
    for (const legend of ["legend", "legend2", "legend3"]) layout[legend].uirevision = "kept";
    return { traces, layout };
  }

  filled(described, lines, range, plotWidth) {
    const { series, part } = described.meta;
    const trace = { ...described, uid: `${series} ${part}` }; // the same thing in every redraw, whatever else is drawn
    if (series === "events") {
      const events = this.distinctEvents(range, plotWidth / MARK_PX);
      return {
        ...trace,
        x: events.map((event) => event.step),
        y: events.map(() => 1),
        text: events.map((event) => event.text),
        marker: { ...trace.marker, symbol: events.map((event) => this.spec.event_symbols[event.kind]) },
      };
    }
    const { x, y } = part === "lone" ? lone(lines[series]) : lines[series];
    if (series !== "not_finite") return { ...trace, x, y };
    const text = Array.from(y, (code) => (code === 0 ? say("NaN, or not recorded") : code > 0 ? "+inf" : "-inf"));
    return { ...trace, x, y: y.map(() => this.spec.top_edge), text };
  }

  // Of events of a kind whose marks would hide each other, the newest.
  distinctEvents([first, last], columns) {
    const found = new Map();
    for (const event of this.run.events) {
      const place = `${event.kind} ${Math.round(((event.step - first) / (last - first)) * columns)}`;
      found.set(place, { ...event, hidden: (found.get(place)?.hidden ?? -1) + 1 });
    }
    return [...found.values()].map((event) => {
      const more = event.hidden ? ` ${say("(and {count} more close by: zoom in)", { count: event.hidden })}` : "";
      return { ...event, text: event.text + more };
    });
  }

  setAxes(layout, lines, range) {
    for (const [name, { axis, series }] of Object.entries(this.spec.plots)) {
      const empty = series.every((one) => lines[one].x.length === 0);
      layout[axis].showticklabels = !empty;
      layout.annotations.find((annotation) => annotation.name === `note ${name}`).visible = empty;
    }
    const plotWidth = layout.width - layout.margin.l - layout.margin.r;
    const named = (name) => layout.annotations.find((annotation) => annotation.name === name);
    if (this.logLoss) {
      Object.assign(layout.yaxis, { type: "log", tickformat: "~g", dtick: this.logDtick(lines.loss.y) }); // with powers of ten the font would be larger
      const none = !lines.loss.y.some((loss) => loss > 0);
      if (none && lines.loss.x.length) Object.assign(named("note loss"), { visible: true, text: say("no loss above 0") });
      if (none) layout.yaxis.showticklabels = false;
      else if (lines.loss.y.some((loss) => loss <= 0)) named("title loss").text += ` · ${say("only above 0")}`;
    }
    named("title memory").text = wrapped(named("title memory").text, plotWidth / this.spec.flags.character_px);
    named("title step").visible = plotWidth > 480; // else the legend is there
    const now = this.plot._fullLayout;
    const zoomed = now?.yaxis2 && !now.yaxis2.autorange ? now.yaxis2.range : extent(lines.scale.y);
    const span = Math.abs(zoomed[1] - zoomed[0]);
    layout.yaxis2.dtick = span > 6 ? 2 ** Math.ceil(Math.log2(span / 6)) : 1;
    if (range[1] - range[0] < 10) layout.xaxis.dtick = 1;
    else delete layout.xaxis.dtick;
  }

  // Labels of all digits collide where there is more than half a decade: then 1, 2 and 5 have one. Else Plotly chooses.
  logDtick(losses) {
    const now = this.plot._fullLayout?.yaxis;
    const known = now?.type === "log" && !now.autorange;
    const [low, high] = known ? now.range : extent(losses.filter((loss) => loss > 0).map(Math.log10));
    return high - low > 0.5 && high - low < 3 ? "D2" : undefined;
  }

  // As flags.py places them, within what is shown.
  addFlags(layout, theme, [first, last], plotWidth) {
    const rule = this.spec.flags;
    const plotHeight = layout.height - layout.margin.t - layout.margin.b;
    const pxPerStep = plotWidth / Math.max(last - first, 1e-9);
    const lanes = Array.from({ length: rule.lanes }, () => []);
    const applied = this.run.events.filter((event) => event.kind === "applied" && event.step >= first && event.step <= last);
    applied.sort((a, b) => a.step - b.step);
    layout.shapes = [];
    const place = (at, texts) => {
      for (const text of texts) {
        const size = rule.character_px * shownLength(text) + 8;
        const sides = [];
        if (at + size <= plotWidth || at <= size) sides.push(false);
        if (at > size) sides.push(true);
        for (const leftwards of sides) {
          const start = leftwards ? at - size : at;
          const lane = lanes.findIndex((taken) => taken.every(([begin, end]) => start >= end || start + size <= begin));
          if (lane < 0) continue;
          lanes[lane].push([start, start + size]);
          return { text, lane, leftwards };
        }
      }
      return null;
    };
    for (const { step, label, short } of applied.slice(-rule.most).reverse()) {
      const placed = place((step - first) * pxPerStep, [label, short]);
      const px = placed ? rule.first_lane_px + placed.lane * rule.lane_px : 0;
      layout.shapes.push({ ...theme.line, x0: step, x1: step, y1: 1 + (placed ? px + rule.lane_px - 2 : 0) / plotHeight });
      if (!placed) continue;
      const { text, leftwards } = placed;
      layout.annotations.push({
        ...theme.label,
        x: step,
        text,
        yshift: px,
        xanchor: leftwards ? "right" : "left",
        xshift: leftwards ? -2 : 2,
      });
    }
  }

  setColours(traces, layout) {
    const { background, text } = takePageColours(traces, layout, this.root, this.plot);
    for (const annotation of layout.annotations) {
      if (annotation.name?.startsWith("title")) annotation.font.color = text;
      if (annotation.bgcolor) Object.assign(annotation, { bgcolor: background, font: { ...annotation.font, color: text } });
    }
  }

  shownSteps() {
    const axis = this.plot._fullLayout?.xaxis;
    if (axis && !axis.autorange && !this.follow) return axis.range.map(Number);
    const ends = [...this.run.events.map((event) => event.step)];
    for (const { x, size } of Object.values(this.run.series)) if (size) ends.push(x[0], x[size - 1]);
    if (!ends.length) return [0, 1];
    const [first, last] = extent(ends);
    const margin = 0.06 * Math.max(last - first, 1); // about what Plotly leaves beside markers
    return [first - margin, last + margin];
  }

  // The user's zoom or pan, or a double click that undoes it.
  moved(change) {
    if (!Object.keys(change).some((key) => /axis\d*\.(range|autorange)/.test(key))) return;
    const layout = this.plot._fullLayout;
    const follow = ["xaxis", "yaxis", "yaxis2", "yaxis3"].every((name) => layout[name].autorange);
    if (follow && !this.follow) return this.startFollowing();
    this.follow = follow;
    this.showButtons();
    clearTimeout(this.rest);
    this.rest = setTimeout(() => this.requestDetail(), ZOOM_REST_MS);
    this.schedule(); // labels and ticks depend on what is shown
  }

  startFollowing() {
    this.follow = true;
    this.follows += 1;
    this.detail = null;
    this.requests += 1; // an answer that is under way is for a zoom that is gone
    this.showButtons();
    this.schedule();
  }

  toggleLog() {
    this.logLoss = !this.logLoss;
    this.showButtons();
    this.schedule();
  }

  requestDetail() {
    if (this.follow || this.plot._fullLayout.xaxis.autorange) return;
    const [first, last] = this.shownSteps();
    this.requests += 1;
    if (first >= this.run.exactFrom) {
      this.detail = null;
      this.schedule();
      return;
    }
    const margin = (last - first) / 2; // so that a short pan has something to show
    tell(this.model, { type: "detail", view: this.id, request: this.requests, range: [first - margin, last + margin] });
  }

  refreshDetail() {
    clearTimeout(this.rest);
    this.rest = setTimeout(() => this.requestDetail(), ZOOM_REST_MS);
  }

  takeDetail(head, data) {
    if (this.follow || head.request !== this.requests) return;
    // It is drawn up to the newest step it can know; what comes later is in the run's own series.
    const lines = Object.fromEntries(unpacked(this.model, head, data));
    this.detail = { first: head.range[0], last: Math.min(head.range[1], head.last_step ?? Infinity), lines };
    this.root.dataset.details = Number(this.root.dataset.details ?? 0) + 1;
    this.schedule();
  }

  withDetail(name, points) {
    if (!this.detail) return points;
    const { first, last, lines } = this.detail;
    const [x, y] = lines[name];
    const before = below(points.x, first, false);
    const after = below(points.x, last, true);
    return {
      x: joined(points.x.subarray(0, before), x, points.x.subarray(after)),
      y: joined(points.y.subarray(0, before), y, points.y.subarray(after)),
    };
  }

  showButtons() {
    this.followButton.setAttribute("aria-pressed", this.follow);
    this.logButton.setAttribute("aria-pressed", this.logLoss);
  }

  describe() {
    const { run } = this;
    if (run.lastStep === null) return;
    const newest = (name) => run.series[name].y[run.series[name].size - 1];
    const steps = run.lastStep + 1; // steps count from 0
    const parts = [steps === 1 ? say("1 step") : say("{count} steps", { count: steps.toLocaleString("en") })];
    const loss = newest("loss");
    if (run.series.loss.size || run.series.not_finite.size) parts.push(Number.isNaN(loss) ? say("loss not finite") : say("loss {loss}", { loss: loss?.toPrecision(4) }));
    const scale = newest("scale");
    if (Number.isFinite(scale)) parts.push(scale === 0 ? say("loss not scaled") : say("loss scale {scale}", { scale: `2^${Number(scale.toFixed(2))}` }));
    const peak = run.series.peak.y.findLast((value) => !Number.isNaN(value));
    if (peak !== undefined) parts.push(say("peak memory {size}", { size: bytesText(peak) }));
    if (run.skipped) parts.push(run.skipped === 1 ? say("1 skipped step") : say("{count} skipped steps", { count: run.skipped.toLocaleString("en") }));
    const summary = parts.join(", ");
    const overview = run.exactFrom > -Infinity && !this.detail ? ` · ${say("overview: zoom in for every step")}` : "";
    this.stateText.textContent = parts.join(" · ") + overview;
    this.root.setAttribute("aria-label", say("Training charts: {summary}", { summary }));
  }
}

function tell(model, message) {
  try {
    model.send(message);
  } catch (error) {
    console.debug("amp_widgets: the kernel cannot be reached", error);
  }
}

// [name, [x, y]] of every series, see `_packed` in live.py.
function unpacked(model, head, data) {
  const bytes = data.buffer.slice(data.byteOffset, data.byteOffset + data.byteLength); // its place in a message is not aligned
  const values = new Float64Array(bytes);
  let at = 0;
  const take = (count) => values.subarray(at, (at += count));
  return model.get("spec").series.map((name, i) => [name, [take(head.counts[i]), take(head.counts[i])]]);
}

// The line without gaps that would be narrower than a pixel or so.
function bridged(xs, ys, narrowest) {
  const x = [];
  const y = [];
  let gapX = null;
  for (let i = 0; i < xs.length; i++) {
    if (Number.isNaN(ys[i])) {
      gapX ??= xs[i];
      continue;
    }
    if (gapX !== null && x.length && xs[i] - x.at(-1) >= narrowest) {
      x.push(gapX);
      y.push(NaN);
    }
    gapX = null;
    x.push(xs[i]);
    y.push(ys[i]);
  }
  return { x: Float64Array.from(x), y: Float64Array.from(y) };
}

// Of more points than can be seen, the lowest and the highest in each column; beside what is shown columns are wider.
function slim(line, [first, last], columns) {
  if (line.x.length <= 3 * columns) return line;
  const column = (last - first) / columns;
  const besides = Math.max(column, (line.x.at(-1) - line.x[0]) / columns) * 4;
  const at = [];
  let bin = null;
  let low = -1;
  let high = -1;
  const keep = () => {
    if (low >= 0) at.push(Math.min(low, high), ...(low === high ? [] : [Math.max(low, high)]));
    low = high = -1;
  };
  for (let i = 0; i < line.x.length; i++) {
    const value = line.y[i];
    if (Number.isNaN(value)) {
      keep();
      at.push(i);
      continue;
    }
    const x = line.x[i];
    const here = Math.floor((x - first) / (x < first || x > last ? besides : column));
    if (here !== bin) keep();
    bin = here;
    if (low < 0 || value < line.y[low]) low = i;
    if (high < 0 || value > line.y[high]) high = i;
  }
  keep();
  if (at.at(-1) !== line.x.length - 1) at.push(line.x.length - 1);
  return { x: Float64Array.from(at, (i) => line.x[i]), y: Float64Array.from(at, (i) => line.y[i]) };
}

function lone({ x, y }) {
  const at = [];
  for (let i = 0; i < y.length; i++) {
    if (!Number.isNaN(y[i]) && !(i > 0 && !Number.isNaN(y[i - 1])) && !(i + 1 < y.length && !Number.isNaN(y[i + 1]))) at.push(i);
  }
  return { x: Float64Array.from(at, (i) => x[i]), y: Float64Array.from(at, (i) => y[i]) };
}

// How many of the ascending values are below the bound, or with `inclusive` at most it.
function below(values, bound, inclusive) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (inclusive ? values[middle] <= bound : values[middle] < bound) low = middle + 1;
    else high = middle;
  }
  return low;
}

function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : [0, 0];
}

function joined(...parts) {
  const all = new Float64Array(parts.reduce((size, part) => size + part.length, 0));
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return all;
}

function grown(values, size) {
  const larger = new Float64Array(size);
  larger.set(values);
  return larger;
}

function wrapped(text, characters) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = lines.at(-1) ? `${lines.at(-1)} ${word}` : word;
    if (shownLength(longer) <= characters) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines.join("<br>");
}

function shownLength(label) {
  return label.replace(/<[^>]+>/g, "").replace(/&[^;]+;/g, "x").length;
}

function bytesText(bytes) {
  const power = Math.min(4, Math.max(0, Math.floor(Math.log10(Math.max(bytes, 1)) / 3)));
  return `${Number((bytes / 1000 ** power).toPrecision(4))} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

function element(tag, className) {
  const made = document.createElement(tag);
  made.className = className;
  return made;
}

function button(text, title, onClick) {
  const made = element("button", "amp-chart-button");
  made.type = "button";
  made.textContent = text;
  made.title = title;
  made.addEventListener("click", onClick);
  return made;
}
