// The Lineage page: what made a target and what came of it, why two differ, where a prompt went.

import { el, get } from "./ui.js";
import { address, choice, form, input, pager, sample, views } from "./views.js";
import { data } from "./lineage_data.js";
import { graph } from "./lineage_graph.js";

const DEPTHS = [["1", "1 step"], ["", "2 steps"], ...["4", "8", "12"].map(n => [n, `${n} steps`])];
const DIRECTIONS = [["", "What made it"], ["yes", "What came of it"]];

function forms(values, names) {
  const list = { list: "known-names", autocomplete: "off", spellcheck: "false", required: true };
  const asked = (title, open, content) => el("details", { open }, el("summary", {}, title), content);
  return [
    el("datalist", { id: "known-names" }, names.map(name => el("option", { value: name }))),
    form("Lineage of one", {}, [
      input("A policy, artifact, stage, path or hash", "target", values, {
        ...list, class: "wide", placeholder: "policy@iter_001, or REV:policy@iter_001",
      }),
      choice("Direction", "down", values, DIRECTIONS),
      choice("Depth", "depth", values, DEPTHS),
    ], "/lineage"),
    el("div", { class: "others" },
      asked("Why do two differ?", Boolean(values.old), form("Two to compare", {}, [
        input("A", "old", values, list), input("B", "new", values, list),
      ], "/lineage")),
      asked("Where did a prompt go?", Boolean(values.prompt && !values.run), form("A prompt", {}, [
        input("Its id, the start of one, or its exact text", "prompt", values, {
          class: "wide", required: true,
        }),
      ], "/lineage"))),
  ];
}

async function tree(values, names) {
  const target = values.target ?? names[names.findLastIndex(name => name.startsWith("policy@iter"))] ?? names[0];
  if (!target) return el("p", { class: "empty" }, "Nothing is recorded yet: `lockstep run` makes something.");
  const { down, depth } = values;
  const found = await get("/api/lineage/tree", { target, down, depth });
  const seen = new Set();
  return [
    el("h2", {}, `${down ? "What came of" : "What made"} ${found.title}`),
    el("p", { class: "heading" }, found.heading.map(line => [line, el("br")])),
    notes(found.notes),
    graph(found, Boolean(down), node => link(node.target, values)),
    el("ul", { class: "tree" }, branch(found, found.root, null, seen, values)),
  ];
}

function branch(found, name, artifacts, seen, values) {
  const node = found.nodes[name], again = seen.has(name) && !node.given;
  seen.add(name);
  const arrow = values.down ? "→" : "←";
  const leads = artifacts ? el("p", { class: "leads" }, `${artifacts.join(", ")} ${arrow}`) : null;
  if (node.given) {
    return el("li", {}, leads, el("div", { class: "panel" },
      el("a", { href: link(node.target, values) }, node.path), " ", el("span", { class: "tag" }, "given")));
  }
  const title = el("h3", {}, el("a", { href: link(node.target, values) }, node.stage),
    again ? " (shown above)" : null);
  if (again) return el("li", {}, leads, el("div", { class: "panel" }, title));
  const steps = found.steps[name];
  return el("li", {}, leads,
    el("div", { class: "panel" }, title,
      node.others ? el("p", { class: "note" }, `${node.others} other stage runs produced the same bytes`) : null,
      el("p", { class: "outs" }, node.outs.map(out => el("a", {
        href: link(out.target, values), title: `${out.path} ${out.hash}`,
      }, `${out.role} ${out.hash.slice(0, 8)}`))),
      rowsLink(node.rows),
      el("details", {}, el("summary", {}, "Params, code, machine, job"), lines(node.facts))),
    steps.length ? el("ul", {}, steps.map(step =>
      branch(found, step.to, step.artifacts, seen, values))) : null,
    found.cut.includes(name) ? el("p", { class: "note" },
      el("a", { href: link(node.target, values) }, `More beyond ${node.stage}`)) : null);
}

const link = (target, { down, depth } = {}) => address("/lineage", { target, down, depth });

export function lines(facts) {
  return el("dl", { class: "lines" }, facts.map(([label, text]) => [el("dt", {}, label), el("dd", {}, text)]));
}

// Where the rows of a stage run are shown; of one prompt alone where it is given.
export function rowsLink(rows, prompt = null, words = null) {
  if (!rows) return null;
  if (rows.data) {
    const to = address("/lineage", { run: rows.data, prompt });
    return el("a", { href: to }, words ?? "Rows that trained it");
  }
  const trained = rows.trained ? "yes" : null;
  const to = address("/samples", { view: "rollouts", iteration: rows.iteration, prompt, trained });
  return el("a", { href: to }, words ?? (trained ? "Rows that trained it" : "Its rows"));
}

function notes(all) {
  return all.map(text => el("p", { class: "warning" }, text));
}

async function diff({ old, new: other }) {
  const found = await get("/api/lineage/diff", { old, new: other });
  return [
    el("h2", {}, found.conclusion),
    notes(found.notes),
    el("div", { class: "halves" }, found.sides.map((side, index) => el("div", { class: "panel" },
      el("h3", {}, `${"AB"[index]}: `, el("a", { href: link(side.text) }, side.text)),
      side.heading.map(line => el("p", { class: "leads" }, line))))),
    found.advice.map(text => el("p", { class: found.broken ? "failure" : "warning" }, text)),
    found.causes.length ? el("section", {},
      el("h2", {}, found.equal ? "Produced differently, A → B" : "Root causes, A → B"),
      el("ul", { class: "tree" }, found.causes.map(text => el("li", { class: "panel" }, text)))) : null,
    found.pairs.length ? el("section", {}, el("h2", {}, "Stage by stage, in order"), el("ul", { class: "tree" },
      found.pairs.map(pair => el("li", { class: "panel" },
        el("h3", {}, `${pair.title} `,
          el("span", { class: "tag" }, pair.is_cause ? "a root cause" : "follows from its inputs")),
        el("p", { class: "kinds" },
          el("a", { href: link(pair.old) }, "A"), el("a", { href: link(pair.new) }, "B")),
        lines(pair.lines))))) : null,
  ];
}

async function prompt(values) {
  const found = await get("/api/lineage/prompt", { prompt: values.prompt });
  const stage = item => el("a", { href: link(item.target) }, item.stage);
  const direct = item => [stage(item), ` ${item.num_rows} rows`,
    item.in_workspace ? null : " (not of the workspace)", " ",
    rowsLink(item.rows, found.prompt_id, "show them")];
  const parts = [
    ["Trained on it", found.direct, direct],
    ["Through an ancestor", found.indirect, item => [stage(item), ` through ${item.through.join(" → ")}`]],
    ["Sampled, not trained on", found.sampled, item =>
      [stage(item), " ", rowsLink(item.rows, found.prompt_id, "show the rows")]],
    ["Evaluated on it", found.evaluated, item => [stage(item)]],
    ["Gone, so not searched", found.gone, item => [stage(item), ` ${item.path}`]],
  ];
  return [
    el("h2", {}, "Prompt ", el("code", {}, found.prompt_id)),
    el("div", { class: "panel" }, sample(found.prompt)),
    notes(found.notes),
    parts.filter(([, items]) => items.length).map(([title, items, shown]) => el("section", {},
      el("h2", {}, title), el("ul", { class: "tree" }, items.map(item => el("li", { class: "panel" }, shown(item)))))),
    parts.every(([, items]) => !items.length) ? el("p", { class: "empty" }, "No stage read it.") : null,
  ];
}

await views("lineage", "Lineage", async values => {
  const { names } = await get("/api/lineage/names");
  const view = values.run ? data : values.prompt ? prompt : values.old && values.new ? diff : tree;
  return [forms(values, names), await view(values, names)].flat();
});
