// Beside page.js.

/** A piece of a run's line, in its colour and dashes. */
function lineSample(run) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  svg.setAttribute("class", "ampw-line-sample");
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("viewBox", "0 0 40 8");
  svg.style.setProperty("--ampw-light", run.light);
  svg.style.setProperty("--ampw-dark", run.dark);
  line.setAttribute("d", "M0 4H40");
  line.setAttribute("stroke-dasharray", run.dash.join(" "));
  svg.append(line);
  return svg;
}
