// Held-out answers of several policies side by side, prompt by prompt.

import { el, get, number, show_error, table } from "./ui.js";
import { address, choice, count, expected, form, input, pager, range, sample } from "./views.js";

const SIZE = 20;
const WHICH = [
  ["", "all"], ["right", "right"], ["wrong", "wrong"], ["changed", "changed"],
  ["better", "better than the first"], ["worse", "worse than the first"],
];
const ENDINGS = { length: "cut off", failed: "environment failed" };

export async function answers(values) {
  const { policies: known } = await get("/api/samples/names");
  if (!known.length && !values.policies) {
    return el("p", { class: "empty" }, "No policy has been evaluated yet: `lockstep run` evaluates all.");
  }
  const chosen = (values.policies ?? "").split(/\s+/).filter(Boolean);
  const policies = chosen.length ? chosen : [...new Set([known[0], known.at(-1)])];
  const { view, start: from, policies: _, ...filters } = values;
  const start = Number(from) || 0;
  const asked = { ...filters, policy: policies, start, size: SIZE };
  const found = await get("/api/samples/answers", asked);
  const at = first => address("/samples", { ...values, start: first || "" });
  const last = start + found.prompts.length;
  const words = found.num_chosen
    ? `${count(start + 1)} to ${count(last)} of ${count(found.num_chosen)} prompts`
    : "No prompt is like that";
  const links = [
    ["Previous", start ? at(Math.max(0, start - SIZE)) : null],
    ["Next", last < found.num_chosen ? at(last) : null],
  ];
  return [
    filterForm(values, policies, known, found),
    totals(found),
    pager(words, links),
    found.prompts.map(prompt => shown(prompt, policies)),
    found.prompts.length > 3 ? pager(words, links) : null,
  ].flat();
}

function filterForm(values, policies, known, found) {
  const last = policies.at(-1);
  const tasks = [["", "all"], ...found.tasks.map(task => [task, task])];
  return form("Which answers", {}, [
    input("Policies, the first to compare with", "policies", { policies: policies.join(" ") }, {
      class: "wide", list: "known-policies", autocomplete: "off", spellcheck: "false",
      placeholder: "sft iter_001 REV:iter_001",
    }),
    el("datalist", { id: "known-policies" }, known.map(name => el("option", { value: name }))),
    choice(`Answer of ${last}`, "which", values, WHICH),
    tasks.length > 1 || values.task ? choice("Task", "task", values, tasks) : null,
    input("Text in prompt or answers", "text", values, { type: "search" }),
    range(`Reward of ${last}`, "reward", values, "any"),
    range("Tokens", "length", values, 1),
  ], address("/samples", { policies: policies.join(" ") }));
}

function totals(found) {
  const percent = value => (value === null ? "–" : `${number(100 * value)}%`);
  const alone = found.num_alone ? `, ${count(found.num_alone)} others were not answered by all` : "";
  return table([
    { title: "Policy", text: true, value: each => each.policy },
    { title: "Right", value: each => percent(each.accuracy) },
    { title: "Reward", value: each => number(each.reward_mean) },
    { title: "Tokens", value: each => number(each.length_mean) },
  ], found.totals, { caption: `Greedy answers to ${count(found.num_prompts)} held-out prompts${alone}` });
}

function shown(prompt, policies) {
  const more = el("div", { class: "sides" });
  const button = el("button", { type: "button", class: "quiet", onclick: () => open() }, "Sampled responses");
  async function open() {
    button.disabled = true;
    try {
      const asked = { policy: policies, prompt_id: prompt.prompt_id };
      const { sampled } = await get("/api/samples/sampled", asked);
      more.replaceChildren(...sampled.map(({ policy, answers }) => el("div", { class: "side" },
        el("h3", {}, `${policy}, sampled`), answers.map(answer => [sample(answer.response), facts(answer)]))));
      button.remove();
    } catch (error) {
      button.disabled = false;
      show_error(error);
    }
  }
  const has_sampled = prompt.answers.some(answer => answer.num_sampled);
  return el("article", { class: "panel prompt" },
    el("header", {},
      el("a", { href: address("/lineage", { prompt: prompt.prompt_id }) }, el("code", {}, prompt.prompt_id)),
      prompt.task === null ? null : el("span", { class: "tag" }, prompt.task)),
    sample(prompt.prompt),
    expected(prompt.answer),
    el("div", { class: "sides" }, prompt.answers.map(answer => el("div", { class: "side" },
      el("h3", {}, answer.policy, " ", answer.outcome ? el("span", { class: "tag" }, answer.outcome) : null),
      sample(answer.response), facts(answer)))),
    has_sampled ? button : null, more);
}

function facts(answer) {
  const judged = answer.correct === null ? null
    : el("span", { class: answer.correct ? "right" : "wrong" }, answer.correct ? "right" : "wrong");
  const often = answer.num_sampled && answer.pass_rate !== null
    ? `${Math.round(100 * answer.pass_rate)}% of ${answer.num_sampled} samples right` : null;
  const rest = [`reward ${number(answer.reward)}`, `${answer.length} tokens`, ENDINGS[answer.finish_reason], often];
  return el("p", { class: "note" }, judged, judged ? ", " : null, rest.filter(Boolean).join(", "));
}
