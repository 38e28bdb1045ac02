// One rollout row: what was sampled token by token, what it was paid, and what it was used for.

import { el, get, number, table } from "./ui.js";
import { address, count, expected, pager, sample } from "./views.js";
import { listed } from "./samples_rollouts.js";
import { tokens } from "./samples_tokens.js";

export async function row(values) {
  const { iteration, row: which, first_token } = values;
  const found = await get("/api/samples/rollout", { iteration, row: which, first_token });
  const to = other => address("/samples", { view: "row", iteration, row: String(other) });
  const all = address("/samples", { view: "rollouts", iteration });
  const group = { rows: found.group, sources: found.by_source.map(by => by.source) };
  return [
    pager(`Row ${count(found.row)} of ${found.name}, which has ${count(found.total)}`, [
      ["Rows", all],
      ["Previous row", found.row ? to(found.row - 1) : null],
      ["Next row", found.row + 1 < found.total ? to(found.row + 1) : null],
    ]),
    el("section", { class: "panel", "aria-labelledby": "prompt" }, el("h2", { id: "prompt" }, "Prompt"),
      sample(found.prompt),
      expected(found.answer),
      el("p", { class: "controls" },
        el("a", { href: address("/lineage", { prompt: found.prompt_id }) }, "Checkpoints trained on this prompt"),
        el("a", { href: address("/lineage", { target: found.target }) }, "Lineage of these rollouts"))),
    el("section", { "aria-labelledby": "response" }, el("h2", { id: "response" }, "Response"),
      tokens(found, first => address("/samples", { ...values, first_token: first }))),
    el("section", { class: "halves" }, scores(found), facts(found)),
    el("section", { "aria-labelledby": "group" },
      el("h2", { id: "group" }, `All ${found.group.length} samples of this prompt`),
      listed(group, iteration, found.row)),
  ];
}

function scores(found) {
  const rows = found.by_source.map(by => ({ name: by.source, value: by.score }));
  if (found.environment_reward !== null) {
    rows.push({ name: "paid by the environment", value: found.environment_reward });
  }
  rows.push({ name: "reward, as it was learnt from", value: found.reward });
  for (const use of found.used) rows.push({ name: `mean advantage as ${use.role}`, value: use.advantage });
  return el("div", {}, el("h2", {}, "Scores"), table([
    { title: "Source", text: true, value: each => each.name },
    { title: "Score", value: each => number(each.value) },
  ], rows, { label: "Scores" }));
}

function facts(found) {
  const rows = [
    ["Prompt", found.prompt_id], ["Step", found.step], ["Sample", found.sample_index],
    ["Greedy", found.greedy ? "yes" : "no"],
    ["Finish", found.finish_reason], ["Tokens", count(found.length)], ["Seed", found.seed],
    ["Sampled by", found.policy], ["Hash of its weights", found.policy_hash],
    ["Trained as", found.used.map(use => use.role).join(", ") || "not trained on"],
    ["Other columns", found.extra === "{}" ? null : found.extra],
  ];
  return el("div", {}, el("h2", {}, "Row"), el("dl", { class: "facts" }, rows
    .filter(([, value]) => value !== null && value !== undefined)
    .map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
}
