// Curves over the iterations: one chart for each metric, one line for each branch of the family.

import { chart, el, number } from "./ui.js";

export function drawIterations(place, groups) {
  place.hidden = !groups.length;
  place.replaceChildren(el("h2", {}, "Over the iterations"), ...groups.flatMap(group => [
    el("h3", {}, group.title),
    el("div", { class: "charts" }, group.charts.map(draw)),
  ]));
}

function draw({ title, meaning, lines, warnings }) {
  const last = warnings.at(-1);
  const figure = chart(lines.map(line => ({ ...line, colour: line.branch % 6 })), {
    title, x: "iteration", note: number(lines[0].points.at(-1)[1]),
    warnings: warnings.map(each => `${each.sentence} (to try: ${each.advice})`),
    limit: last ? { y: last.threshold, text: last.sentence } : null,
  });
  if (meaning) figure.title = meaning;
  return figure;
}
