const FORMAT_LAB_TEXT = say("A format keeps a number in a fixed count of bits. The exponent says between which powers of two it lies, and the fraction divides that interval into equal steps (one step is an ulp): exponent bits buy range, fraction bits buy precision. What lies between two steps is rounded to the nearer one (of two equally near, the even one). Below the smallest normal number the steps stay as wide as they are there, so that bits are lost one by one (subnormal), until nothing is left (underflow to zero); what is too large overflows. Type a number, drag its exponent, or click a bit to flip it: every format then shows the same number.");
const BIT_PARTS = { sign: say("sign"), exponent: say("exponent"), fraction: say("fraction"), integer: say("integer") };
const FORMAT_LAB_EXAMPLES = say("The buttons below are examples: 1234.56 fits into four digits before the point and two after it, 0.0001 becomes zero there, and 1234567 does not fit. 2e-5 times 1000 is 0.02, which fp16 keeps well: scale, store, unscale. fp16 still stores 2e-7, as a subnormal with few bits left, and 2e-8 is flushed to zero.");

export default {
  render({ model, el }) {
    const { body, heading, setWaiting, showLost, remove } = frame(el, say("Number formats"), "ampw-formats");
    heading.querySelector(".ampw-chip").title = say("The kernel is busy: what is shown follows when it has answered");

    // ---- fields ----

    const inputs = new Map(); // field → its parts and what it shows
    const field = (name, label, options = {}) => {
      const id = uid();
      const problem = h("p", { class: "ampw-rejection", id: `${id}-problem`, role: "alert", hidden: true });
      const input = h("input", {
        type: "text", id, autocomplete: "off", spellcheck: "false", ...options.attributes,
        onchange: () => commit(name),
        onkeydown: (event) => {
          if (event.key === "Escape") input.value = input.dataset.drawn = inputs.get(name).shown();
          if (event.key === "Enter" && !event.shiftKey && !event.ctrlKey && !event.metaKey && !event.altKey) {
            event.preventDefault(); // in a notebook, the browser's own change event may never come
            commit(name);
          }
        },
      });
      inputs.set(name, { input, problem, shown: options.shown ?? (() => model.get(name)), message: options.message ?? ((text) => ({ [name]: text })) });
      return { label: h("label", { for: id }, label), input, problem };
    };
    const commit = (name) => {
      const { input, message } = inputs.get(name);
      if (input.value === input.dataset.drawn) return; // asked for already, with Enter
      input.dataset.drawn = input.value;
      asked.ask(message(input.value), { [name]: input.value });
    };
    const digitsField = (index, label) => field(`digits.${index}`, label, {
      attributes: { inputmode: "numeric", size: 2 },
      shown: () => String(model.get("digits")[index]),
      message: (text) => {
        const digits = [...model.get("digits")];
        digits[index] = text.trim();
        return { digits };
      },
    });

    // A slider that is dragged asks once at a time, and again with where it is by then.
    const slider = (name, label, attributes, spoken) => {
      const id = uid();
      let next = null;
      const readout = h("output", { for: id });
      const input = h("input", {
        type: "range", id, step: 1, ...attributes,
        onkeydown: (event) => { if (event.key === " ") event.preventDefault(); }, // it would scroll the notebook
        oninput: () => {
          readout.value = spoken(Number(input.value));
          next = Number(input.value);
          send();
        },
      });
      const send = () => {
        if (next === null || asked.waits()) return;
        const value = next;
        next = null;
        asked.ask({ [name]: value }, { [name]: value });
      };
      const draw = () => {
        input.disabled = asked.locked();
        if (next === null) {
          input.value = asked.value(name, model.get(name));
          readout.value = spoken(Number(input.value));
        }
        input.setAttribute("aria-valuetext", readout.value);
        queueMicrotask(send);
      };
      return { label: h("label", { for: id }, label), input, readout, draw };
    };

    const button = (text, message, attributes = {}) => h("button", { type: "button", ...attributes, onclick: () => asked.ask(message) }, text);

    // ---- the number ----

    const number = field("text", say("Number"), { attributes: { class: "ampw-typed", title: say("Such as 0.1, 2e-8, 2**-24, 1/3 or -inf; Enter takes it") } });
    const float64 = h("span", { class: "ampw-dim ampw-float64" });
    const [lowest, highest] = model.get("exponents");
    const exponent = slider("exponent", say("Exponent"), { min: lowest, max: highest }, (power) => `2^${power}`);
    const presets = h("div", { class: "ampw-presets", role: "group", "aria-label": say("Examples") }, ...model.get("presets").map(([name, text]) => button(text, { preset: name })));
    const int8Scale = field("int8_scale", say("int8 scale"), { attributes: { inputmode: "decimal", title: say("int8 stores whole multiples of this, from -128 to 127 of them") } });
    const before = digitsField(0, say("Fixed point: digits before"));
    const after = digitsField(1, say("and after the point"));
    const flipProblem = h("p", { class: "ampw-rejection", role: "alert", hidden: true });
    const digitsProblem = h("p", { class: "ampw-rejection", role: "alert", hidden: true });

    // ---- tables ----

    const table = (className, caption, columns) => {
      const rows = h("tbody", { role: "rowgroup" });
      const heads = columns.map(([name, title]) => h("th", { scope: "col", role: "columnheader", title }, name));
      const element = h("table", { class: `ampw-format-table ${className}`, role: "table", "aria-label": caption },
        h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, ...heads)), rows);
      return { element, rows, heads };
    };
    const cell = (label, ...children) => h("td", { role: "cell", "data-label": label }, ...children);
    const verdict = () => h("span", { class: "ampw-outcome" });
    const setVerdict = (element, row) => {
      setText(element, row.word);
      element.dataset.tone = row.tone;
    };

    const main = table("ampw-format-main", say("The number in each format"), [
      [say("Format")], [say("Bits"), say("Sign, exponent and fraction; a click flips one")], [say("Stored")], [say("Rounding error"), say("Stored less typed; of the number; in units of the last place")],
      [say("Neighbours"), say("The next stored numbers, and their distance")], [say("Range"), say("From the smallest number above 0 to the largest")],
    ]);
    const legend = h("p", { class: "ampw-parts-key", "aria-hidden": "true" }, ...Object.entries(BIT_PARTS).slice(0, 3).map(([part, word]) => h("span", { "data-part": part }, word)),
      h("span", { class: "ampw-key-subnormal" }, say("range, subnormal")), h("span", { class: "ampw-key-at" }, say("the number in it")));

    const bitRow = (name, count, groups) => {
      const [exponentBits] = groups;
      const part = (index) => (index === 0 ? "sign" : index <= exponentBits ? "exponent" : exponentBits ? "fraction" : "integer");
      const group = h("div", { class: "ampw-bits", role: "group", "aria-label": say("{name} bits, arrow keys move", { name }) });
      const bits = [];
      let line = null;
      for (let index = 0; index < count; index++) {
        const bit = h("button", {
          type: "button", class: "ampw-bit", "data-part": part(index) === "integer" ? "fraction" : part(index), tabindex: index ? -1 : 0,
          onclick: () => {
            move(index);
            asked.ask({ flip: [name, count - 1 - index] });
          },
          onfocus: () => move(index),
          onkeydown: (event) => {
            if (event.ctrlKey || event.metaKey || event.altKey) return;
            const to = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: count - 1 }[event.key];
            if (to === undefined) return;
            event.preventDefault();
            bits[Math.min(Math.max(to, 0), count - 1)].focus();
          },
        });
        if (index === 1 || (exponentBits && index === exponentBits + 1)) bit.classList.add("ampw-group-start");
        if (index === 0 || (count > 20 && index === 16)) { // the first line of fp32 is what bf16 would keep
          line = h("span", { class: "ampw-bit-line" });
          group.append(line);
        }
        bits.push(bit);
        line.append(bit);
      }
      const move = (index) => bits.forEach((bit, at) => { bit.tabIndex = at === index ? 0 : -1; });
      return {
        group,
        draw: (text, disabled) => bits.forEach((bit, index) => {
          const digit = text === "" ? "–" : text[index];
          if (bit.textContent !== digit) bit.textContent = digit;
          bit.dataset.bit = digit;
          bit.setAttribute("aria-label", say("{name} bit {number}, {part}, {digit}", { name, number: count - 1 - index, part: BIT_PARTS[part(index)], digit: text === "" ? say("none") : digit }));
          setOff(bit, disabled || text === "");
        }),
      };
    };

    const digitRow = () => {
      const parts = ["sign", "before", "after"].map((part) => h("span", { class: "ampw-digits", "data-part": part === "sign" ? "sign" : part === "before" ? "exponent" : "fraction" }));
      const group = h("div", { class: "ampw-bits", role: "img" },
        h("span", { class: "ampw-bit-line" }, parts[0], parts[1], h("span", { class: "ampw-point" }, "."), parts[2]));
      return {
        group,
        draw: (digits) => {
          digits.forEach((text, at) => {
            if (parts[at].dataset.text === text) return;
            parts[at].dataset.text = text;
            parts[at].replaceChildren(...[...text].map((digit) => h("span", { class: "ampw-bit ampw-digit", "data-part": parts[at].dataset.part, "data-bit": digit }, digit)));
          });
          const [sign, ...rest] = digits;
          group.setAttribute("aria-label", say("digits {digits}", { digits: `${sign}${rest.join(".")}` }));
        },
      };
    };

    let mainRows = [];
    let drawnNames = "";
    const makeMain = (rows) => {
      mainRows = rows.map((row) => {
        const bits = row.digits.length ? digitRow() : bitRow(row.name, 1 + row.groups[0] + row.groups[1], row.groups);
        const layout = h("span", { class: "ampw-dim" });
        const meaning = h("span", { class: "ampw-dim ampw-meaning" });
        const stored = h("b", { class: "ampw-stored" });
        const word = verdict();
        const error = h("div", { class: "ampw-stack" });
        const [above, below, spacing, range, decades] = Array.from({ length: 5 }, () => h("span", {}));
        const name = h("b", {}, row.name);
        const span = (className) => h("span", { class: className });
        const bar = { range: span("ampw-bar-range"), subnormal: span("ampw-bar-subnormal"), at: span("ampw-bar-at") };
        const line = h("tr", { role: "row" },
          h("th", { scope: "row", role: "rowheader" }, name, layout),
          cell(say("Bits"), bits.group, meaning),
          cell(say("Stored"), stored, word),
          cell(say("Rounding error"), error),
          cell(say("Neighbours"), h("div", { class: "ampw-stack" },
            h("span", {}, h("i", {}, say("above"), " "), above), h("span", {}, h("i", {}, say("below"), " "), below), h("span", {}, h("i", {}, say("spacing"), " "), spacing))),
          cell(say("Range"), h("div", { class: "ampw-bar", "aria-hidden": "true" }, bar.range, bar.subnormal, bar.at), h("div", { class: "ampw-stack" }, range, decades)));
        return { line, name, layout, bits, meaning, stored, word, error, above, below, spacing, range, decades, bar };
      });
      main.rows.replaceChildren(...mainRows.map((row) => row.line));
    };
    const drawMain = (rows, locked) => {
      const names = rows.map((row) => row.name).join();
      const shape = rows.map((row) => row.digits.length || row.name).join();
      if (shape !== drawnNames) makeMain(rows);
      drawnNames = shape;
      rows.forEach((row, at) => {
        const line = mainRows[at];
        setText(line.name, row.name);
        setText(line.layout, row.layout);
        if (row.digits.length) line.bits.draw(row.digits);
        else line.bits.draw(row.bits, locked);
        for (const name of ["meaning", "stored", "above", "below", "spacing", "range", "decades"]) setText(line[name], row[name]);
        setVerdict(line.word, row);
        const errors = row.error.length ? row.error : ["–"];
        if (line.error.dataset.text !== errors.join()) {
          line.error.dataset.text = errors.join();
          line.error.replaceChildren(...errors.map((text) => h("span", {}, text)));
        }
        const { range, subnormal, at: mark } = line.bar;
        const place = (element, from, to) => { element.style.left = `${from}%`; element.style.width = `${Math.max(to - from, 0)}%`; };
        place(range, row.bar.normal, row.bar.to);
        place(subnormal, row.bar.from, row.bar.normal);
        mark.hidden = row.bar.at === null;
        if (row.bar.at !== null) mark.style.left = `${row.bar.at}%`;
      });
    };

    // A table of text: the format, numbers, and a word at the end.
    const drawPlain = (into, rows, cells) => {
      while (into.rows.childElementCount > rows.length) into.rows.lastElementChild.remove();
      rows.forEach((row, at) => {
        let line = into.rows.children[at];
        if (!line) {
          const labels = into.heads.slice(1).map((head) => head.textContent);
          line = h("tr", { role: "row" }, h("th", { scope: "row", role: "rowheader" }, h("b", {})),
            ...labels.map((label, index) => cell(label, index === labels.length - 1 ? verdict() : h("span", {}))));
          into.rows.append(line);
        }
        setText(line.children[0].firstChild, row.name);
        cells(row).forEach((text, index) => setText(line.children[index + 1].firstChild, text));
        setVerdict(line.lastElementChild.firstChild, row);
      });
    };

    // ---- scale, store, unscale ----

    const scaled = table("ampw-format-scaled", say("Scale, store, unscale"), [
      [say("Format")], [say("× scale")], [say("Stored")], [say("÷ scale")], [say("Error"), say("Of the number, with the scale")], [say("Error without scale"), say("Of the number, stored as it is")], [say("What is stored")],
    ]);
    const scale = field("scale", say("Scale"), { attributes: { inputmode: "decimal", title: say("Such as 1000 or 2^16; Enter takes it") } });
    const scaleExponent = slider("scale_exponent", say("as a power of two"), { min: 0, max: 40 }, (power) => `2^${power}`);

    // ---- a real weight ----

    const updates = table("ampw-format-updates", say("Does the update change the weight"), [
      [say("Format")], [say("w stored")], [say("spacing there")], [say("w - lr·g stored"), say("The step of plain SGD")], [say("With plain SGD the weight")],
    ]);
    const pickId = uid();
    const pick = h("select", { id: pickId, onchange: () => asked.ask({ pick: Number(pick.value) }, { picked: Number(pick.value) }) });
    const pickedNumbers = h("p", { class: "ampw-numbers-line", role: "status" });
    const rule = h("p", { class: "ampw-stale", hidden: true });
    const readProblem = h("p", { class: "ampw-rejection", role: "alert", hidden: true });
    const weights = h("section", { class: "ampw-part", "aria-label": say("A real weight"), hidden: true },
      h("h4", {}, say("A real weight")),
      h("p", { class: "ampw-dim" }, say("A weight that is kept in a format moves only if what is taken from it is more than about half of the spacing of the numbers there. Otherwise it is rounded back to w, and nothing is learned. w - lr·g is the rule of plain SGD.")),
      h("div", { class: "ampw-line-of-fields" }, h("label", { for: pickId }, say("Weight")), pick,
        button(say("Show w above"), { look: "w" }), button(say("Show g above"), { look: "g" }), button(say("Read again"), { read: true })),
      readProblem, pickedNumbers, rule, updates.element);

    body.append(
      h("p", { class: "ampw-dim ampw-explained" }, FORMAT_LAB_TEXT),
      h("p", { class: "ampw-dim ampw-explained" }, FORMAT_LAB_EXAMPLES),
      h("div", { class: "ampw-line-of-fields" }, number.label, number.input, float64, h("span", { class: "ampw-lab-slide" }, exponent.label, exponent.input, exponent.readout)),
      number.problem, presets,
      h("div", { class: "ampw-scroll-free" }, h("div", { class: "ampw-line-of-fields ampw-above-table" }, legend, h("span", { class: "ampw-parameters-of" },
        int8Scale.label, int8Scale.input, before.label, before.input, after.label, after.input)),
      int8Scale.problem, digitsProblem, flipProblem, main.element),
      h("section", { class: "ampw-part", "aria-label": say("Scale, store, unscale") },
        h("h4", {}, say("Scale, store, unscale")),
        h("p", { class: "ampw-dim" }, say("What loss scaling does with gradients: multiplied by the scale the number lies where the format has numbers; stored there and divided again, more of it is left.")),
        h("div", { class: "ampw-line-of-fields" }, scale.label, scale.input, h("span", { class: "ampw-lab-slide" }, scaleExponent.label, scaleExponent.input, scaleExponent.readout)),
        scale.problem, scaled.element),
      weights);

    const spoken = h("p", { class: "ampw-spoken", role: "status" });
    body.append(spoken);

    let options = null;
    const draw = () => {
      const locked = asked.locked();
      const problems = model.get("problems");
      for (const [name, { input, problem, shown }] of inputs) {
        const wrong = problems[name] ?? "";
        setText(problem, wrong);
        input.setAttribute("aria-invalid", String(wrong !== ""));
        if (wrong) input.setAttribute("aria-describedby", problem.id);
        else input.removeAttribute("aria-describedby");
        input.disabled = locked;
        const editing = input.matches(":focus") && input.value !== input.dataset.drawn && !asked.waits();
        if (!editing && !wrong) { // what was typed wrongly stays, to be mended
          input.value = asked.value(name, shown());
          input.dataset.drawn = input.value;
        }
      }
      for (const name of ["digits.0", "digits.1"]) inputs.get(name).input.setAttribute("aria-invalid", String("digits" in problems));
      setText(digitsProblem, problems.digits ?? "");
      setText(flipProblem, problems.flip ?? "");
      setText(readProblem, problems.read ?? "");
      setText(float64, model.get("float64") && `= ${model.get("float64")}`);
      exponent.draw();
      scaleExponent.draw();
      for (const one of el.querySelectorAll("button:not(.ampw-bit)")) setOff(one, locked);
      pick.disabled = locked;
      drawMain(model.get("rows"), locked);
      setText(spoken, `${model.get("text")}: ${model.get("rows").map((row) => `${row.name} ${row.word}`).join(", ")}`);
      drawPlain(scaled, model.get("scaled"), (row) => [...row.cells, row.error, row.without]);
      weights.hidden = !model.get("has_weights");
      if (options !== model.get("samples")) {
        options = model.get("samples");
        pick.replaceChildren(...options.map((label, at) => h("option", { value: at }, label)));
      }
      pick.value = asked.value("picked", model.get("picked"));
      setText(pickedNumbers, model.get("picked_numbers") || say("There are no weights with gradients to choose from yet; read again when a step is made"));
      setText(rule, model.get("optimizer"));
      drawPlain(updates, model.get("updates"), (row) => row.cells);
      updates.element.hidden = !options.length;
      setWaiting(false);
      clearTimeout(slow);
      if (asked.waits()) slow = setTimeout(() => setWaiting(asked.waits()), 400); // a kernel that is not busy answers sooner
    };
    let slow = 0;
    const asked = asking(model, el, showLost, draw);
    model.on("change", draw);
    draw();
    return () => {
      clearTimeout(slow);
      remove();
      asked.remove();
    };
  },
};
