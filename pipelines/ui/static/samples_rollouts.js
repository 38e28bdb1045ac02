// The rollout rows of an iteration: a page of those that are wanted.

import { el, get, number, table } from "./ui.js";
import { beside } from "./trail.js";
import { address, choice, count, form, input, pager, range, sample } from "./views.js";

const SIZE = 50;
const FINISH = [["", "any"], ["stop", "stop"], ["length", "length"], ["failed", "failed"]];
const TRAINED = [["", "all rows"], ["yes", "trained on"], ["no", "not trained on"]];

export async function rollouts(values) {
  const { iterations } = await get("/api/samples/names");
  const iteration = values.iteration ?? iterations.at(-1);
  if (!iteration) {
    return el("p", { class: "empty" }, "No iteration has rollouts yet: `lockstep run` samples them.");
  }
  const { view, start: from, trail, ...filters } = values;
  const start = Number(from) || 0;
  const found = await get("/api/samples/rollouts", { ...filters, iteration, start, size: SIZE });
  const choices = iterations.map(name => [name, name]);
  return [
    filterForm({ ...values, iteration }, choices, found),
    summary(found),
    place(values, start, found),
    found.rows.length ? listed(found, iteration) : null,
    found.rows.length > 8 ? place(values, start, found) : null,
  ];
}

function filterForm(values, iterations, found) {
  const sources = [["", "reward"], ...found.sources.map(name => [name, name])];
  return form("Which rollouts", { view: "rollouts" }, [
    choice("Iteration", "iteration", values, iterations),
    input("Text in prompt or response", "text", values, { type: "search" }),
    input("Prompt id", "prompt", values, { type: "search", spellcheck: "false" }),
    found.sources.length > 1 || values.source ? choice("Score of", "source", values, sources) : null,
    range(values.source ? "Score" : "Reward", "reward", values, "any"),
    range("Tokens", "length", values, 1),
    choice("Finish", "finish", values, FINISH),
    found.has_experience || values.trained ? choice("Rows", "trained", values, TRAINED) : null,
  ], address("/samples", { view: "rollouts", iteration: values.iteration }));
}

function summary(found) {
  const by = found.policy ? `, sampled by ${found.policy}` : "";
  const lacking = [
    found.has_scores ? null : "no scores yet",
    found.has_experience ? null : "no record of what was trained on",
  ].filter(Boolean).join(", ");
  const what = [`${found.name}: ${count(found.total)} rows${by}. `, lacking && `${lacking}. `];
  return el("p", { class: "intro" }, what,
    el("a", { href: address("/lineage", { target: found.target }) }, "Lineage"));
}

// How far was searched is said where it is not obvious: filters look at rows until they have a
// page, or until the time is up.
function place(values, start, found) {
  const { view, iteration, start: _, trail, ...filters } = values;
  const filtered = Object.values(filters).some(Boolean);
  const at = place => (place ? address("/samples", { ...values, ...place }) : null);
  const { after, before, first } = beside(values, found.next);
  const n = found.rows.length;
  const total = count(found.total);
  let words = n ? `Rows ${count(start)} to ${count(start + n - 1)}; there are ${total}` : "No rows here";
  if (filtered) {
    let where = `the first ${count(found.searched)} rows of ${total}`;
    if (found.next === null && !start) where = `all ${total} rows`;
    if (start) where = `rows ${count(start)} to ${count(found.searched - 1)} of ${total}`;
    words = `${n ? count(n) : "No"} matching ${n === 1 ? "row" : "rows"} in ${where}`;
  }
  // Without a filter it is known where the page before begins, whichever way one came here.
  const previous = filtered ? before : start && { start: Math.max(0, start - SIZE) || "" };
  return pager(words, [
    ["First", start && (filtered || start > SIZE) ? at(first) : null],
    ["Previous", at(previous)],
    [filtered && n < SIZE ? "Search on" : "Next", at(filtered || !after ? after : { start: after.start })],
  ]);
}

export function listed(found, iteration, own = null) {
  const several = found.sources?.length > 1 ? found.sources : [];
  const score = name => each => number(each.by_source.find(by => by.source === name)?.score);
  const has = test => found.rows.some(test);
  const to = each => address("/samples", { view: "row", iteration, row: each.row || "0" });
  const columns = [
    { title: "Row", text: true, value: each => (each.row === own ? `${each.row}, this one`
      : el("a", { href: to(each), "aria-label": `Row ${each.row}` }, each.row)) },
    own === null && { title: "Prompt", text: true, value: each => sample(each.prompt) },
    { title: "Response", text: true,
      value: each => sample(each.is_clipped ? `${each.response}…` : each.response) },
    has(each => each.step !== null) && { title: "Step", value: each => each.step },
    { title: "Sample", value: each => (each.greedy ? `${each.sample_index}, greedy` : each.sample_index) },
    has(each => each.reward !== null) && { title: "Reward", value: each => number(each.reward) },
    ...several.map(name => ({ title: name, value: score(name) })),
    has(each => each.used.length) && { title: "Trained as", text: true, value: each =>
      each.used.map(use => use.role).join(", ") },
    has(each => each.used.length) && { title: "Advantage, mean", value: each =>
      each.used.map(use => number(use.advantage)).join(", ") },
    { title: "Tokens", value: each => each.length },
    { title: "Finish", text: true, value: each => each.finish_reason },
  ].filter(Boolean);
  return table(columns, found.rows, { label: "Rollout rows" });
}
