// The rows of data that a stage was trained on.

import { el, get, number, table } from "./ui.js";
import { beside } from "./trail.js";
import { address, count, pager, sample } from "./views.js";

const SIZE = 50;
const TEXTS = ["prompt", "completion", "chosen", "rejected"];

export async function data({ run, prompt, start: from, trail }) {
  const start = Number(from) || 0;
  const found = await get("/api/lineage/rows", { run, prompt, start, size: SIZE });
  const at = place => (place ? address("/lineage", { run, prompt, ...place }) : null);
  const { after, before, first } = beside({ start: from, trail }, found.next);
  const n = found.rows.length;
  const words = prompt
    ? `${count(n)} rows of prompt ${prompt} in the first ${count(found.searched)} of ${count(found.total)}`
    : `Rows ${count(start)} to ${count(start + n - 1)}; there are ${count(found.total)}`;
  const cell = name => each => {
    const value = each[name];
    if (name === "prompt_id") return el("a", { href: address("/lineage", { prompt: value }) }, el("code", {}, value));
    if (TEXTS.includes(name)) return sample(value ?? "");
    return typeof value === "number" ? number(value) : value ?? "";
  };
  return [
    el("h2", {}, `Rows that trained ${found.stage}`),
    el("p", { class: "heading" }, `${found.path} ${found.hash}`),
    pager(words, [
      ["First", start ? at(first) : null],
      ["Previous", at(before)],
      [prompt && n < SIZE ? "Search on" : "Next", at(after)],
    ]),
    table([
      { title: "Row", text: true, value: each => each.row },
      ...found.columns.map(name => ({ title: name.replace("_", " "), text: true, value: cell(name) })),
    ], found.rows, { label: "Rows of training" }),
  ];
}
