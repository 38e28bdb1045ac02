// What a change of params would cost: `lockstep plan -S key=value`. Nothing runs.

import { duration, el, get, set_state, state, table } from "./ui.js";

export function draw_plan(place) {
  const settings = el("textarea", { rows: 2, spellcheck: "false", placeholder: "policy_update.learning_rate=1e-4" });
  settings.value = state().set ?? "";
  const profile = el("input", { value: state().profile ?? "", placeholder: "local", size: 14 });
  const found = el("div", { "aria-live": "polite" });
  const submit = el("button", { type: "submit" }, "Plan");
  place.replaceChildren(
    el("h2", {}, "What a change would cost"),
    el("p", { class: "intro" }, "Params as `lockstep plan -S` takes them, one key=value a line. Nothing runs, and params.yaml stays as it is."),
    el("form", {
      class: "sides", onsubmit: event => {
        event.preventDefault();
        set_state({ set: settings.value.trim(), profile: profile.value.trim() });
        ask(found, submit);
      },
    }, el("label", {}, "Settings", settings),
    el("div", { class: "controls" }, el("label", { class: "controls" }, "Profile", profile), submit)), found);
  if (state().set) ask(found, submit);
}

async function ask(place, submit) {
  const { set, profile } = state();
  if (!set) {
    place.replaceChildren(el("p", { class: "failure" }, "Write at least one key=value."));
    return;
  }
  submit.disabled = true;
  place.replaceChildren(el("p", { class: "note" }, "Planning…"));
  try {
    const settings = set.split("\n").map(line => line.trim()).filter(Boolean);
    place.replaceChildren(...shown(await get("/api/compare/plan", { set: settings, profile })));
  } catch (error) {
    place.replaceChildren(el("p", { class: "failure", role: "alert" }, error.message));
  } finally {
    submit.disabled = false;
  }
}

function shown(plan) {
  const of = how => plan.stages.filter(stage => stage.how === how).length;
  const parts = [`${of("run")} to run with profile ${plan.profile}`, of("restore") ? `${of("restore")} to restore` : "",
    `${plan.num_up_to_date} up to date`];
  return [
    el("p", {}, `${parts.filter(Boolean).join(", ")}. ${cost(plan, of("run"))}`),
    ...plan.problems.map(problem => el("p", { class: "warning" }, problem)),
    plan.stages.length ? table([
      { title: "Stage", text: true, value: stage => stage.address },
      { title: "", text: true, value: stage => stage.how },
      { title: "Last time", value: stage => took(stage) },
      { title: "Memory", value: stage => stage.memory || "–" },
      { title: "Why", text: true, value: stage => stage.reasons.join(", ") },
    ], plan.stages, { label: "Stages that would run" }) : null,
  ].filter(Boolean);
}

function cost(plan, runs) {
  if (!runs) return "";
  if (runs === plan.num_unknown) return "No time of these stages is recorded here.";
  const hours = plan.gpu_seconds ? `, ${Number((plan.gpu_seconds / 3600).toPrecision(2))} GPU hours` : "";
  const unknown = plan.num_unknown ? `; of ${plan.num_unknown} stages no time is recorded here` : "";
  return `About ${duration(plan.seconds)} of jobs by their last times${hours}${unknown}.`;
}

function took(stage) {
  if (stage.seconds === null) return "–";
  return `${stage.like ? `like ${stage.like}, ` : ""}${duration(stage.seconds)}${stage.gpus ? ` on ${stage.gpus} GPU` : ""}`;
}
