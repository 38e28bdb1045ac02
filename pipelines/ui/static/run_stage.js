// The chosen stage: how it stands, what went wrong and what to do, its curves and the end of its log.

import { chart, duration, el, number } from "./ui.js";
import { KIND } from "./run_graph.js";

const drawn = new WeakMap();

export function drawStage(place, row, detail, actions) {
  if (place.dataset.stage !== row.stage) {
    place.dataset.stage = row.stage;
    place.replaceChildren(...["head", "pace", "trouble", "body", "curves", "logs"].map(name =>
      el("div", { class: name })));
  }
  const part = name => place.querySelector(`:scope > .${name}`);
  const fixed = { ...row, since: null, progress: null };
  once(part("head"), [row.state, row.reason, actions.mayChange, actions.busy], () => head(row, actions));
  part("pace").replaceChildren(...pace(row, actions.now()));
  once(part("trouble"), [fixed, detail?.curves.length], () => trouble(row, detail));
  once(part("body"), [fixed, detail?.resources, detail?.summary], () => facts(row, detail, actions));
  if (!detail) return;
  // A curve that is being read stays as it is.
  if (!part("curves").matches(":hover")) {
    once(part("curves"), [row.warnings, detail.curves], () => curves(row, detail));
  }
  drawLogs(part("logs"), row, detail);
  // Who looks for what went wrong reads the log first.
  if (KIND[row.state] === "bad" && part("curves").nextSibling === part("logs")) place.append(part("curves"));
}

// What has not changed is left alone: a button that is replaced while it is pressed does nothing.
function once(place, values, make) {
  const key = JSON.stringify(values);
  if (drawn.get(place) === key) return;
  drawn.set(place, key);
  const focused = place.contains(document.activeElement) ? document.activeElement.textContent : null;
  place.replaceChildren(...make());
  if (focused) [...place.querySelectorAll("button")].find(each => each.textContent === focused)?.focus();
}

function head(row, { start, end, close, mayChange, busy }) {
  const live = KIND[row.state] === "live" || KIND[row.state] === "queued";
  return [
    el("div", { class: "title" },
      el("h2", {}, row.stage),
      el("span", { class: `tag is-${KIND[row.state] ?? "wait"}` }, row.state),
      el("div", { class: "controls" },
        live ? el("button", { type: "button", class: "danger", disabled: !mayChange, onclick: end }, "Cancel this stage")
          : KIND[row.state] === "done" ? null
            : el("button", { type: "button", disabled: !mayChange || busy, onclick: start }, "Run up to here"),
        el("button", { type: "button", class: "quiet", onclick: close }, "Close"))),
    row.reason ? el("p", { class: "note plain" }, row.reason) : "",
  ];
}

function pace(row, at) {
  const limit = row.limit && KIND[row.state] === "live" ? ` of ${duration(row.limit)}` : "";
  const time = row.since !== null ? [`for ${duration(Math.max(0, at - row.since))}${limit}`] : [];
  if (!row.progress) return time.length ? [el("p", { class: "note" }, time)] : [];
  const { phase, done, total, left, rate, numbers } = row.progress;
  const words = [`${phase} ${done}/${total}`.trim()];
  if (rate) words.push(rate >= 1 ? `${rate.toFixed(1)}/s` : `${duration(1 / rate)} each`);
  if (left !== null) words.push(`${duration(left)} left`);
  for (const [name, value] of Object.entries(numbers)) words.push(`${name} ${number(value)}`);
  return [el("div", { class: "progress" },
    el("progress", { max: total || 1, value: done, "aria-label": "Progress of the job" }),
    el("span", { class: "note" }, [...words, ...time].join("  ·  ")))];
}

function trouble(row, detail) {
  const charted = new Set((detail?.curves ?? []).map(curve => curve.name));
  const warnings = row.warnings.filter(each => !charted.has(each.metric)).map(each =>
    el("p", { class: "warning" }, sentence(each)));
  if (!row.error) return row.advice ? [...warnings, el("p", { class: "warning" }, row.advice)] : warnings;
  return [
    el("div", { class: "failure" }, el("p", { class: "plain" }, row.error),
      row.advice ? el("p", { class: "advice" }, `What to do: ${row.advice}`) : null),
    ...warnings,
  ];
}

function sentence(warning) {
  return `${warning.sentence} (to try: ${warning.advice})`;
}

function facts(row, detail, { choose, needed }) {
  const links = names => names.flatMap((name, index) => [index ? ", " : "",
    el("button", { type: "button", class: "link", onclick: () => choose(name) }, name)]);
  const { resources = {}, summary = {} } = detail ?? {};
  const lists = [[
    ["needs", row.needs.length ? links(row.needs) : "nothing before it"],
    ["needed by", needed.length ? links(needed.map(each => each.stage)) : "nothing"],
    ["time", row.elapsed !== null ? duration(row.elapsed) : null],
    ["took", detail?.cost ?? null],
    ["attempts", row.attempts > 1 ? row.attempts : null],
    ["restarts", row.restarts || null],
    ["MLflow", row.mlflow && /^https?:/.test(row.mlflow) ? el("a", { href: row.mlflow }, "its run") : null],
  ], [
    ["profile", resources.profile ? `${resources.profile} (${resources.executor})` : null],
    ["nodes", resources.nodes > 1 ? `${resources.nodes} × ${resources.tasks_per_node} processes` : null],
    ["GPUs per node", resources.gpus_per_node || null],
    ["cores per process", resources.cpus_per_task],
    ["memory per node", resources.memory],
    ["partition", resources.partition],
    ["runs on", row.where],
    ["job", row.job],
  ], Object.entries(summary).slice(0, 9).map(([name, value]) => [name, number(value)])];
  const titles = ["In the graph", resources.given ? "Resources of its job" : "Resources that it would get", "What came out"];
  return [el("div", { class: "columns" }, lists.map((list, index) => {
    const known = list.filter(([, value]) => value !== null && value !== undefined);
    return known.length ? el("div", {}, el("h3", {}, titles[index]),
      el("dl", { class: "facts" }, known.map(([name, value]) =>
        el("div", {}, el("dt", {}, name), el("dd", {}, value))))) : null;
  }))];
}

function curves(row, detail) {
  if (!detail.curves.length) return [];
  return [el("h3", {}, "Step by step"), el("div", { class: "charts" }, detail.curves.map(curve => {
    const warnings = row.warnings.filter(each => each.metric === curve.name);
    return chart([{ name: curve.name, points: curve.points }], {
      title: curve.name, x: "step", note: number(curve.points.at(-1)?.[1]),
      warnings: warnings.map(sentence),
      limit: warnings.length ? { y: warnings[0].threshold, text: warnings[0].sentence } : null,
    });
  }))];
}

// Who reads the end of a log stays at its end as it grows; who reads above stays there.
function drawLogs(place, row, detail) {
  if (!detail.logs.length) {
    const why = row.log ? "Its job has not written anything." : "This clone has no job, and so no log, of it.";
    place.replaceChildren(el("h3", {}, "Log"), el("p", { class: "empty" }, why));
    return;
  }
  const names = detail.logs.map(log => log.path).join("\n");
  if (place.dataset.logs !== names) {
    place.dataset.logs = names;
    place.replaceChildren(...detail.logs.flatMap(log => [
      el("h3", { title: log.path }, log.name),
      el("pre", { class: "log", tabindex: 0, "aria-label": `The end of ${log.name}` })]));
  }
  place.querySelectorAll("pre").forEach((pre, index) => {
    const atEnd = pre.scrollTop + pre.clientHeight >= pre.scrollHeight - 4 || !pre.textContent;
    if (pre.textContent !== detail.logs[index].text) pre.textContent = detail.logs[index].text;
    if (atEnd) pre.scrollTop = pre.scrollHeight;
  });
}
