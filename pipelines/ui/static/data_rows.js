// Rows with their tokens: searched, paged, and coloured by what is trained on.

import { el, get, set_state, state, takeTurn } from "./ui.js";
import { beside } from "./trail.js";
import { visible } from "./visible.js";

const CLASSES = {
  "prompt": "asked", "not trained on": "untrained", "trained on": "trained",
  "wrong step": "wrong-step", "right step": "right-step",
};
const HIDDEN = new Set(["template", "row_id", "prompt_id", "source", "line"]);
const TEXTS = new Set(["prompt", "completion", "chosen", "rejected"]);

export const named = role => role.replaceAll("_", " ");

export async function draw_rows(place, report, role, draw) {
  const { source = "", text = "", start = "", ids } = state();
  const from = Number(start) || 0;
  const isLast = takeTurn(place);
  const found = await get("/api/data/rows", { role, source, text, start: from });
  if (!isLast()) return;
  const kinds = new Set(found.rows.flatMap(row => row.parts.flatMap(part => part.pieces.map(piece => piece.kind))));
  const went = found.rows.length ? found.rows.map(row => card(row, found.kinds, ids === "1"))
    : el("p", { class: "empty" }, found.searched_to < found.num_rows
      ? `None of the rows ${from + 1} to ${found.searched_to} match; search on below.` : "No row matches from here on.");
  place.replaceChildren(
    filters(report, role, { source, text, ids }, draw),
    el("div", { class: "legend" }, [...kinds].sort().map(kind => el("span", {},
      el("span", { class: `token ${CLASSES[found.kinds[kind]]}` }, found.kinds[kind])))),
    el("div", { class: "rows" }, went),
    pager(found, from, draw));
}

function filters(report, role, shown, draw) {
  const sources = [...new Set(report.sources.filter(row => row.role === role).map(row => row.source))];
  const source = el("select", {}, el("option", { value: "" }, "all sources"),
    sources.map(name => el("option", { value: name, selected: name === shown.source }, name)));
  const text = el("input", { type: "search", value: shown.text, placeholder: "part of any text of a row" });
  const ids = el("input", { type: "checkbox", checked: shown.ids === "1" });
  ids.addEventListener("change", () => { set_state({ ids: ids.checked ? "1" : "" }); draw(); });
  return el("form", {
    class: "controls", onsubmit: event => {
      event.preventDefault();
      set_state({ source: source.value, text: text.value, start: "", trail: "" });
      draw();
    },
  },
  el("label", {}, `Source of the ${named(role)}`, source), el("label", {}, "Text", text),
  el("button", { type: "submit" }, "Search"), el("label", { class: "inline" }, ids, "token ids"));
}

function card(row, kinds, with_ids) {
  const { values } = row;
  const facts = Object.entries(values).filter(([name, value]) =>
    !HIDDEN.has(name) && !TEXTS.has(name) && value !== null && value !== "{}");
  return el("article", { class: "panel row" },
    el("h3", {}, `Row ${row.number.toLocaleString("en")}`),
    el("p", { class: "note plain" }, `${values.source ?? "?"}, line ${values.line ?? "?"} · row ${values.row_id ?? "?"} · prompt ${values.prompt_id}`),
    row.parts.map(part => tokens(part, learnt(part, values), kinds, with_ids)),
    facts.length ? el("dl", { class: "facts" }, facts.map(([name, value]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, visible(Array.isArray(value) ? value.join(", ") : String(value)))))) : null);
}

function learnt(part, values) {
  if (part.name === "prompt") return "";
  return values.step_labels ? `, ${values.step_labels.length} steps, each labelled at its last token`
    : `, ${part.num_trained} trained on`;
}

function tokens(part, learnt_of_it, kinds, with_ids) {
  const runs = [];
  let at = 0;
  for (const piece of part.pieces) {
    if (!runs.length || runs.at(-1).kind !== piece.kind) runs.push({ kind: piece.kind, spans: [] });
    const names = [CLASSES[kinds[piece.kind]], piece.special ? "special" : ""].join(" ");
    const place = piece.ids.length > 1 ? `tokens ${at} to ${at + piece.ids.length - 1}` : `token ${at}`;
    runs.at(-1).spans.push(el("span", { class: `token ${names}`, title: `${place}, id ${piece.ids.join(" ")}, ${kinds[piece.kind]}` },
      shown(piece.text), with_ids ? el("sub", {}, piece.ids.join(" ")) : null));
    at += piece.ids.length;
  }
  return el("div", {},
    el("h4", {}, `${part.name}: ${part.num_tokens} tokens${learnt_of_it}`),
    el("div", { class: "tokens sample" }, runs.map(run => [
      el("span", { class: "unseen" }, `[${kinds[run.kind]}] `), run.spans])),
    part.num_left_out ? el("p", { class: "note" }, `${part.num_left_out} more tokens are not shown`) : null);
}

// A line break is seen and still breaks the line; so does a space that stands alone.
function shown(text) {
  const seen = visible(text).replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
  return seen === " " ? "␣" : seen;
}

function pager(found, from, draw) {
  const { after, before, first } = beside(state(), found.searched_to < found.num_rows ? found.searched_to : null);
  const button = (words, to) => el("button", {
    type: "button", disabled: !to, onclick: () => { set_state(to); draw(); },
  }, words);
  return el("div", { class: "controls pager" },
    button("First rows", from ? first : null), button("Previous rows", before), button("Next rows", after),
    el("span", { class: "note" }, `looked at rows ${(from + 1).toLocaleString("en")} to ${found.searched_to.toLocaleString("en")} of ${found.num_rows.toLocaleString("en")}, in ${found.num_groups} row group${found.num_groups === 1 ? "" : "s"}`));
}
