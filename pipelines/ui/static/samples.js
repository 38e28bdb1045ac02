// The Samples page: held-out answers of policies side by side, and the rollouts of an iteration.

import { el } from "./ui.js";
import { address, views } from "./views.js";
import { answers } from "./samples_answers.js";
import { rollouts } from "./samples_rollouts.js";
import { row } from "./samples_row.js";

const VIEWS = { answers, rollouts, row };

function tabs(view, values) {
  const iteration = values.iteration;
  const all = [
    ["Held-out answers", address("/samples", {}), view === "answers"],
    ["Rollouts", address("/samples", { view: "rollouts", iteration }), view !== "answers"],
  ];
  return el("nav", { class: "tabs", "aria-label": "Kinds of samples" }, all.map(([title, href, own]) =>
    el("a", { href, "aria-current": own ? "page" : null }, title)));
}

await views("samples", "Samples", async values => {
  const view = values.view in VIEWS ? values.view : "answers";
  return [tabs(view, values), await VIEWS[view](values)].flat();
});
