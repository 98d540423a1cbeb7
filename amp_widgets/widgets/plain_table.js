// Tables of texts, and what else is made anew when it is another. Beside page.js.

/** Fill an element with what `make` gives, where `data` is not what it was filled with. */
function putAnew(element, data, make) {
  const drawn = JSON.stringify(data);
  if (element.dataset.drawn === drawn) return;
  element.dataset.drawn = drawn;
  element.replaceChildren(...make());
}

/** A table of texts, the first row its headings; `words` are the columns that are no numbers. */
function plainTable(rows, words, labelledBy) {
  const kind = (column) => (words.includes(column) ? null : "ampw-number");
  const [heads, ...lines] = rows;
  return h("table", { "aria-labelledby": labelledBy },
    h("thead", {}, h("tr", {}, ...heads.map((text, i) => h("th", { scope: "col", class: kind(i) }, text)))),
    h("tbody", {}, ...lines.map((line) => h("tr", {}, ...line.map((text, i) =>
      i === 0 ? h("th", { scope: "row" }, text) : h("td", { class: kind(i), title: text.length > 24 ? text : null }, text))))));
}
