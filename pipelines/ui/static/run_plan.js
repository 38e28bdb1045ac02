// What `lockstep run` would do, and why.

import { duration, el, table } from "./ui.js";

export function drawPlan(place, { profile, stages, up_to_date: fresh, unfit }) {
  const restored = stages.filter(each => each.cached).length;
  const known = stages.map(each => each.last_time).filter(Boolean);
  const total = known.reduce((sum, last) => sum + last.seconds, 0);
  const counts = [
    `${stages.length - restored} to run with profile ${profile}`,
    restored ? `${restored} to restore` : "", `${fresh} up to date`,
    known.length ? `about ${duration(total)} of jobs by their last times` : "",
  ].filter(Boolean).join(", ");
  const close = el("button", { type: "button", class: "quiet", onclick: () => { place.hidden = true; } }, "Close");
  const columns = [
    { title: "stage", text: true, value: row => row.address },
    { title: "how", text: true, value: row => (row.cached ? "restore" : "run") },
    { title: "why", text: true, value: row => row.reasons.slice(0, 3).join(", ") + (row.reasons.length > 3 ? ", …" : "") },
    { title: "last time", value: row => (row.last_time ? duration(row.last_time.seconds) : "") },
    { title: "GPUs", value: row => row.gpus || "" },
    { title: "memory", text: true, value: row => row.memory ?? "" },
  ];
  place.replaceChildren(
    el("div", { class: "title" }, el("h2", {}, "Plan"), el("div", { class: "controls" }, close)),
    el("p", { class: "intro" }, counts),
    ...unfit.map(text => el("p", { class: "failure plain" }, text)),
    stages.length ? table(columns, stages, { label: "Plan" }) : el("p", { class: "empty" }, "Everything is up to date."));
  place.hidden = false;
}
