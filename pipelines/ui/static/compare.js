// The Compare page: what `lockstep compare` says of up to six sides, and what a change of params
// would cost. The sides, how many samples, and the settings are in the address.

import { chart, el, get, page, set_state, show_error, state, table, takeTurn } from "./ui.js";
import { draw_plan } from "./compare_plan.js";
import { pair_section } from "./compare_pairs.js";

const SIDES = ["a", "b", "c", "d", "e", "f"];

async function start() {
  const main = document.querySelector("main");
  await page("compare");
  const { revisions } = await get("/api/compare/names");
  const form = el("section", {});
  const result = el("div", { "aria-live": "polite" });
  const plan = el("section", {});
  main.replaceChildren(el("h1", {}, "Compare"),
    el("p", { class: "intro" }, "Policies side by side, as `lockstep compare` has them: params that differ, metrics, "
      + "curves, wins, and the samples that changed sides. The first side is what the others are measured against."),
    form, result, plan);
  const draw = async () => {
    const sides = chosen();
    draw_form(form, revisions, sides, draw);
    draw_plan(plan);
    await draw_result(result, sides, draw);
  };
  addEventListener("popstate", () => draw().catch(show_error));
  await draw();
  main.dataset.ready = "true";
}

const chosen = () => SIDES.map(name => state()[name]).filter(Boolean);

// ---- which sides

function draw_form(place, revisions, sides, draw) {
  const inputs = [];
  const names = el("div", { class: "names" });
  const add = value => {
    const input = el("input", { list: "known", value, autocomplete: "off", spellcheck: "false" });
    inputs.push(input);
    names.append(el("label", {}, `Side ${SIDES[inputs.length - 1].toUpperCase()}`, input));
    return input;
  };
  for (let index = 0; index < Math.max(2, sides.length); index += 1) add(sides[index] ?? "");
  const more = el("button", {
    type: "button", disabled: inputs.length === SIDES.length,
    onclick: () => { add("").focus(); more.disabled = inputs.length === SIDES.length; },
  }, "Add a side");
  const form = el("form", {
    class: "sides", onsubmit: event => {
      event.preventDefault();
      const given = inputs.map(input => input.value.trim()).filter(Boolean);
      set_state(Object.fromEntries(SIDES.map((name, index) => [name, given[index] ?? ""])));
      draw().catch(show_error);
    },
  }, names, el("datalist", { id: "known" }, options(revisions)),
  el("div", { class: "controls" }, el("button", { type: "submit", class: "primary" }, "Compare"), more));
  place.replaceChildren(form, known(revisions, inputs, add));
}

// Policies of the workspace by their names alone; elsewhere, a revision is its last policy.
function options(revisions) {
  return revisions.flatMap(each => {
    const prefix = each.kind === "workspace" ? "" : `${each.name}:`;
    const label = each.kind === "workspace" ? "workspace" : `${each.kind} ${each.name} ${each.subject}`;
    return [el("option", { value: each.name }, `${label}, last policy`),
      ...each.policies.map(policy => el("option", { value: prefix + policy }, label))];
  });
}

function known(revisions, inputs, add) {
  if (!revisions.length) {
    return el("p", { class: "empty" }, "No policy was evaluated here yet: `lockstep run` evaluates all.");
  }
  const put = name => {
    const free = inputs.find(input => !input.value) ?? (inputs.length < SIDES.length ? add("") : inputs.at(-1));
    free.value = name;
    free.focus();
  };
  return el("details", {}, el("summary", {}, `Names that exist (${revisions.length} revisions)`), table([
    { title: "Name", text: true, value: each => el("button", { type: "button", class: "quiet", onclick: () => put(each.name) }, each.name) },
    { title: "Kind", text: true, value: each => each.kind },
    { title: "Commit", text: true, value: each => each.subject },
    { title: "Policies", text: true, value: each => each.policies.map(policy => el("button", {
      type: "button", class: "quiet", onclick: () => put(each.kind === "workspace" ? policy : `${each.name}:${policy}`),
    }, policy)) },
  ], revisions, { label: "Names that exist" }));
}

// ---- the comparison

async function draw_result(place, sides, draw) {
  const isLast = takeTurn(place);
  if (!sides.length) {
    place.replaceChildren(el("p", { class: "empty" }, "Name at least two sides: a policy, REV:POLICY, a commit, tag, experiment, or workspace."));
    return;
  }
  place.replaceChildren(el("p", { class: "note" }, "Comparing…"));
  const limit = state().samples ?? "5";
  let answer;
  try {
    answer = await get("/api/compare/sides", { side: sides, limit });
  } catch (error) {
    if (isLast()) place.replaceChildren(el("p", { class: "failure", role: "alert" }, error.message));
    return;
  }
  if (!isLast()) return;
  const { comparison, shown } = answer;
  const names = comparison.sides.map(side => side.name);
  place.replaceChildren(
    ...comparison.notes.map(note => el("p", { class: "warning" }, note)),
    section("Sides", facts(comparison, shown), downloads(sides, limit)),
    section("Params that differ", params(comparison, shown, names)),
    section("Metrics", el("p", { class: "intro" }, "In brackets, 95% intervals; ±, one standard error over prompts."),
      metrics(comparison, shown, names)),
    section("Curves", curves(comparison, names)),
    section("Wins, and samples that changed sides", how_many(limit, draw),
      comparison.pairs.length ? comparison.pairs.map((pair, index) => pair_section(pair, shown.pairs[index], names))
        : el("p", { class: "empty" }, "No answers are here to compare.")));
}

function section(title, ...children) {
  return el("section", {}, el("h2", {}, title), children);
}

function facts(comparison, shown) {
  const rows = comparison.sides.map((side, index) => {
    const [name, policy, revision, through] = shown.sides[index];
    return { index, name, policy, revision, through, answers: side.evaluation.slice(0, 8) };
  });
  return table([
    { title: "Name", text: true, value: row => el("span", { class: `swatch-name b${row.index}` }, el("i", {}), row.name) },
    { title: "Policy", text: true, value: row => row.policy },
    { title: "Of", text: true, value: row => row.revision },
    { title: "Trained through", text: true, value: row => row.through },
    { title: "Answers", text: true, value: row => row.answers },
  ], rows, { label: "Sides" });
}

function downloads(sides, limit) {
  const query = new URLSearchParams(sides.map(side => ["side", side]));
  const json = `/api/compare/compare.json?${query}`;
  query.append("limit", limit);
  return el("p", { class: "controls links" },
    el("a", { class: "button", href: `/api/compare/compare.html?${query}`, download: "compare.html" }, "One page for a review (HTML)"),
    el("a", { class: "button", href: json, download: "compare.json" }, "JSON"));
}

function params(comparison, shown, names) {
  if (!comparison.params.length) return el("p", { class: "empty" }, "None differ.");
  return table([
    { title: "Param", text: true, value: row => row.key },
    ...names.map((name, index) => ({ title: name, text: true, value: row => row.values[index] })),
  ], comparison.params.map((each, at) => ({ key: each.key, values: shown.params[at] })), { label: "Params that differ" });
}

function metrics(comparison, shown, names) {
  return table([
    { title: "Metric", text: true, value: row => el("span", { title: row.meaning }, row.label) },
    ...names.map((name, index) => ({ title: name, value: row => row.values[index] })),
  ], comparison.metrics.map((each, at) => ({
    label: each.label, meaning: shown.meanings[at], values: shown.metrics[at],
  })), { label: "Metrics" });
}

function curves(comparison, names) {
  if (!comparison.curves.length) return el("p", { class: "empty" }, "No side has more than one evaluated policy behind it.");
  return el("div", { class: "charts" }, comparison.curves.map(curve => chart(
    overlaid(curve.lines, names), { title: curve.label, x: "iterations after SFT" })));
}

// Sides that were trained through the same policies share the start of their lines: the longest is
// drawn first and whole, the others over it in dashes, so that each is seen.
function overlaid(lines, names) {
  return lines
    .map((line, index) => ({
      name: names[index], colour: index, points: line.map(point => [point.step, point.at.value]),
    }))
    .sort((one, other) => other.points.length - one.points.length)
    .map((each, place) => ({ ...each, dashed: place > 0 }));
}

function how_many(limit, draw) {
  const select = el("select", {}, [["5", "5 of each pair"], ["20", "20 of each pair"], ["0", "all"]].map(
    ([value, text]) => el("option", { value, selected: value === limit }, text)));
  select.addEventListener("change", () => {
    set_state({ samples: select.value === "5" ? "" : select.value });
    draw().catch(show_error);
  });
  return el("p", { class: "controls" }, el("label", { class: "controls" }, "Samples shown", select));
}

start().catch(show_error);
