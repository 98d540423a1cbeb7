// [heading, what it means, whether numbers]; that of the loss is in `loss_head`
const COLUMNS = [
  [say("settings"), say("The format of autocast, and the set of checkpointed layers"), false],
  [say("peak"), say("The most that is held at one time within a step"), true],
  [say("×\u00a0peak"), say("The peak, of that of fp32/none: below 1 is less memory"), true],
  [say("step time"), say("Of the median step; below it the middle half of the steps"), true],
  [say("×\u00a0time"), say("The step time, of that of fp32/none: below 1 is faster. Grey: not known, within the spread or of too few steps"), true],
  [say("samples/s"), say("Samples a second, of the median step"), true],
  [say("loss"), say("On this batch, after so many training steps on it"), true],
  [say("error of gradients"), say("Relative error of the first step's gradients against those of fp32/none"), true],
  [say("skipped"), say("Steps that were skipped because of inf or NaN in the gradients"), true],
  [say("use"), say("Ask for these settings, in force from the next step"), false],
];
const LOSS_COLUMN = 6;
const AXES = [["format", "formats", say("Formats")], ["set", "sets", say("Checkpointed layers")]];

export default {
  render({ model, el }) {
    const { body, heading, titleId, setWaiting, showLost, remove } = frame(el, say("Compare settings"), "ampw-compare");
    const summary = h("span", { class: "ampw-dim" });
    heading.append(summary);

    const boxes = AXES.map(([axis, trait, title]) => {
      const made = new Map(); // name → its parts
      const field = h("fieldset", {}, h("legend", {}, title));
      for (const [name] of model.get(trait)) {
        const id = uid();
        const whyId = uid();
        const box = h("input", {
          type: "checkbox", id, "aria-describedby": whyId,
          onclick: (event) => { if (isOff(box)) event.preventDefault(); },
          onchange: () => asked.ask({ axis, name, on: box.checked }, { [`${axis} ${name}`]: box.checked }),
        });
        const label = h("label", { for: id });
        const tick = h("span", { class: "ampw-tick" }, box, label);
        const why = h("span", { class: "ampw-why-off", id: whyId, hidden: true });
        field.append(tick, why);
        made.set(name, { box, label, tick, why });
      }
      return { axis, trait, field, made };
    });
    const number = (trait, title) => {
      const id = uid();
      const list = h("select", { id, onchange: () => asked.ask({ [trait]: Number(list.value) }, { [trait]: Number(list.value) }) },
        ...model.get(`all_${trait}`).map((value) => h("option", { value }, String(value))));
      return { trait, list, field: h("span", { class: "ampw-choice" }, h("label", { for: id }, title), list) };
    };
    const numbers = [number("steps", say("timed steps a round")), number("rounds", say("rounds"))];
    const size = h("span", { class: "ampw-dim", id: uid() });
    const compare = h("button", { type: "button", onclick: () => asked.ask({ compare: true }, { compare: true }) });
    const noBatch = h("span", { class: "ampw-dim", id: uid(), hidden: true });
    const whyNot = h("p", { class: "ampw-sentence ampw-stale", role: "status", hidden: true });

    const bar = h("div", {});
    const track = h("div", { class: "ampw-track", role: "progressbar", "aria-label": say("Comparison"), "aria-valuemin": 0, "aria-valuemax": 100 }, bar);
    const doing = h("span", {});
    const cancel = h("button", { type: "button", onclick: () => asked.ask({ cancel: true }, { cancel: true }) }, say("Cancel"));
    const progress = h("div", { class: "ampw-progress", hidden: true }, h("div", {}, doing, track), cancel);

    const lossHead = h("span", {}, "loss");
    const heads = COLUMNS.map(([label, title, numeric], position) =>
      h("th", { scope: "col", title, class: numeric ? "ampw-number" : position === COLUMNS.length - 1 ? "ampw-action" : null }, position === LOSS_COLUMN ? lossHead : label));
    const { view, lines } = scrolledTable(titleId, ...heads);
    const verdict = h("ul", { class: "ampw-verdict", role: "status" });
    const words = h("div", {});
    const obtained = h("details", { class: "ampw-obtained" }, h("summary", {}, say("How it was measured")), words);
    body.append(
      h("details", { class: "ampw-explained", open: true }, h("summary", {}, say("What is compared")),
        h("p", {}, model.get("explanation")), h("p", {}, model.get("example"))),
      h("div", { class: "ampw-lines" }, ...boxes.map(({ field }) => field),
        h("div", { class: "ampw-choices" }, ...numbers.map(({ field }) => field), size)),
      h("div", { class: "ampw-choices" }, compare, noBatch),
      progress, whyNot, view, verdict, obtained);

    let rows = null;
    let uses = []; // of each row the parts that change
    const fill = () => {
      rows = model.get("rows");
      uses = [];
      lines.replaceChildren(...rows.map((row, position) => {
        const head = h("th", { scope: "row", title: row.title || null, "data-format": row.format },
          h("b", {}, row.label), h("small", {}, row.layers || say("no layer")));
        if (row.why_not) {
          uses.push(null);
          return h("tr", {}, head, h("td", { class: "ampw-reason", colspan: COLUMNS.length - 1 }, row.why_not));
        }
        const use = h("button", { type: "button", onclick: () => asked.ask({ use: position }, { [`use ${position}`]: "requested" }) });
        const cell = (text, below = "", className = "", title = null) =>
          h("td", { class: `ampw-number ${className}`, title }, text, ...(below ? [h("small", {}, below)] : []));
        const element = h("tr", {}, head,
          cell(row.peak), cell(row.peak_ratio), cell(row.time, row.spread),
          cell(row.time_ratio, "", row.unsure ? "ampw-unsure" : "", row.unsure || null),
          cell(row.samples), cell(row.loss), cell(row.gradients, row.remark), cell(row.skipped), h("td", { class: "ampw-action" }, use));
        uses.push({ use, element });
        return element;
      }));
    };
    const putList = (list, texts, make) => {
      if (list.dataset.drawn === JSON.stringify(texts)) return;
      list.dataset.drawn = JSON.stringify(texts);
      list.replaceChildren(...texts.map(make));
    };

    const draw = () => {
      const locked = asked.locked();
      for (const { axis, trait, made } of boxes) {
        for (const [name, text, on, whyOff] of model.get(trait)) {
          const { box, label, tick, why } = made.get(name);
          box.checked = !whyOff && asked.value(`${axis} ${name}`, on);
          setOff(box, locked || whyOff !== "");
          tick.toggleAttribute("data-off", whyOff !== "");
          setText(label, text);
          setText(why, whyOff);
        }
      }
      for (const { trait, list } of numbers) {
        list.value = asked.value(trait, model.get(trait));
        list.disabled = locked;
      }
      setText(size, model.get("size"));
      const pending = model.get("pending") || asked.value("compare", false);
      const none = !boxes.every(({ made }) => [...made.values()].some(({ box }) => box.checked));
      setText(compare, pending ? say("Comparing …") : model.get("rows").length ? say("Compare again") : say("Compare"));
      compare.setAttribute("aria-busy", String(pending));
      compare.setAttribute("aria-describedby", `${size.id} ${noBatch.id}`);
      setText(noBatch, model.get("why_no_batch"));
      const hide = !pending || locked;
      if (hide && progress.contains(document.activeElement)) compare.focus({ preventScroll: true });
      progress.hidden = hide;
      setOff(compare, locked || pending || none || model.get("why_no_batch") !== "");
      const percent = model.get("pending") ? Math.round(100 * model.get("fraction")) : 0;
      bar.style.width = `${percent}%`;
      track.setAttribute("aria-valuenow", percent);
      const cancelling = model.get("cancelling") || asked.value("cancel", false);
      setText(doing, model.get("progress") || say("Asked for …"));
      track.setAttribute("aria-valuetext", doing.textContent);
      setOff(cancel, cancelling);
      setText(whyNot, model.get("why_not"));
      setText(summary, model.get("caption"));
      setText(lossHead, model.get("loss_head"));
      if (rows !== model.get("rows")) fill();
      view.hidden = verdict.hidden = obtained.hidden = !rows.length;
      uses.forEach((row, position) => {
        if (row === null) return;
        const how = asked.value(`use ${position}`, model.get("uses")[position] ?? "");
        row.element.dataset.use = how;
        setText(row.use, how === "" ? say("Use") : how === "in force" ? say("In force") : say("Requested"));
        row.use.setAttribute("aria-label", how === "" ? say("Use these settings: {settings}", { settings: rows[position].label }) : `${row.use.textContent}: ${rows[position].label}`);
        setOff(row.use, locked || how !== "");
      });
      putList(verdict, model.get("verdict"), (text) => h("li", {}, text));
      putList(words, model.get("details"), (text) => h("p", {}, text));
      setWaiting(asked.waits());
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
