// Two sides prompt by prompt: who wins, and the samples that are on another side than before.

import { el, number, table } from "./ui.js";
import { visible } from "./visible.js";

export function pair_section(pair, numbers, names) {
  const [old, recent] = [names[pair.old], names[pair.new]];
  const title = el("h3", {}, `${recent} against ${old}`);
  if (!pair.num_prompts) {
    return el("div", { class: "pair" }, title, el("p", { class: "empty" }, "No held-out prompt was answered by both."));
  }
  const left = pair.num_changed - pair.changed.length;
  return el("div", { class: "pair" }, title,
    el("p", { class: "intro" }, `${pair.outcome}, over ${pair.num_prompts.toLocaleString("en")} prompts`),
    table([
      { title: "Of the prompts that both answered", text: true, value: row => row[0] },
      { title: recent, text: true, value: row => row[1] },
    ], numbers, { label: `${recent} against ${old}` }),
    pair.changed.map(sample => changed(sample, old, recent)),
    left ? el("p", { class: "note" }, `${left.toLocaleString("en")} more samples changed sides`) : null);
}

function changed(sample, old, recent) {
  return el("article", { class: "panel sample-pair" },
    el("h4", { dir: "auto" }, visible(sample.prompt)),
    el("p", { class: "controls" }, el("span", { class: "tag" }, sample.outcome),
      sample.task ? el("span", { class: "tag" }, visible(sample.task)) : null,
      sample.answer === null ? null : el("span", { class: "note plain" }, `expected: ${visible(sample.answer)}`)),
    el("div", { class: "answers" }, answer(old, sample.old), answer(recent, sample.new)));
}

function answer(name, response) {
  const marks = { true: ["right", "✓ right"], false: ["wrong", "✗ wrong"] };
  const [kind, word] = marks[String(response.correct)] ?? ["note", ""];
  return el("div", {},
    el("p", {}, el("strong", {}, name), " ", el("span", { class: kind }, word),
      el("span", { class: "note" }, ` reward ${number(response.reward)}, ${response.length} tokens, ended by ${response.finish_reason}`)),
    el("pre", { class: "sample", tabindex: 0, role: "region", "aria-label": `Response of ${name}` }, visible(response.response) || "(empty)"));
}
