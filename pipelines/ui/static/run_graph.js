// The graph: a lane for each iteration, its stages in order, and lanes for what comes before and
// after. The chosen stage shows what it needs and what needs it.

import { duration, el } from "./ui.js";

export const KIND = {
  "up to date": "done", restored: "done", published: "done", completed: "done",
  running: "live", starting: "live", queued: "queued", suspended: "queued",
  failed: "bad", died: "bad", cancelled: "off", stale: "stale", waiting: "wait",
};

const chips = new Map();

export function drawGraph(place, rows, change, { chosen, choose, now }) {
  if (change.whole) {
    const isFirst = !chips.size;
    chips.clear();
    const lanes = lanesOf([...rows.values()]);
    place.replaceChildren(...lanes.map(lane => drawLane(lane, choose)));
    place.style.setProperty("--columns", Math.max(1, ...lanes.filter(each => each.key).map(each => each.rows.length)));
    for (const row of rows.values()) fill(chips.get(row.stage), row, now());
    markNeighbours(rows, chosen);
    if (isFirst) showWork(place);
    return;
  }
  for (const row of change.stages) fill(chips.get(row.stage), row, now());
}

// Of a graph that is higher than its frame, first the lane that is at work or comes next.
function showWork(place) {
  const next = place.querySelector(".stage:not(.is-done)");
  if (next) place.scrollTop = next.closest(".lane").offsetTop - place.offsetTop - 80;
}

export function markNeighbours(rows, chosen) {
  const needs = new Set(rows.get(chosen)?.needs ?? []);
  for (const [name, button] of chips) {
    button.setAttribute("aria-pressed", String(name === chosen));
    button.classList.toggle("needed", needs.has(name));
    button.classList.toggle("feeds", Boolean(rows.get(name)?.needs.includes(chosen)));
  }
}

export function tickClocks(rows, at) {
  for (const row of rows.values()) {
    if (row.since !== null) fill(chips.get(row.stage), row, at);
  }
}

// Before the iterations, the iterations, and what needs them.
function lanesOf(rows) {
  const byName = new Map(rows.map(row => [row.stage, row]));
  const after = new Map();
  const isAfter = row => {
    if (!after.has(row.stage)) {
      after.set(row.stage, false);
      after.set(row.stage, row.needs.some(name => {
        const other = byName.get(name);
        return other && (other.iteration || isAfter(other));
      }));
    }
    return after.get(row.stage);
  };
  const lanes = new Map();
  for (const row of rows.filter(each => each.iteration)) {
    if (!lanes.has(row.iteration)) lanes.set(row.iteration, { title: row.iteration, key: row.iteration, rows: [] });
    lanes.get(row.iteration).rows.push(row);
  }
  const single = rows.filter(row => !row.iteration);
  const last = single.filter(isAfter), first = single.filter(row => !last.includes(row));
  return [
    { title: lanes.size ? "start" : "stages", key: null, rows: first }, ...lanes.values(),
    { title: "end", key: null, rows: last },
  ].filter(lane => lane.rows.length);
}

function drawLane(lane, choose) {
  const stages = lane.rows.map((row, index) => {
    const joined = index > 0 && row.needs.includes(lane.rows[index - 1].stage);
    const chip = el("button", {
      type: "button", class: "stage", "data-stage": row.stage, "aria-pressed": "false",
      onclick: () => choose(row.stage),
    },
    el("span", { class: "name" }, row.stage.split("@")[0]),
    el("span", { class: "state" }),
    el("span", { class: "bar" }, el("i")));
    chips.set(row.stage, chip);
    return el("li", { class: joined ? "joined" : null }, chip);
  });
  return el("div", { class: lane.key ? "lane" : "lane single" },
    el("h2", {}, lane.title), el("ol", {}, stages));
}

function fill(button, row, at) {
  if (!button) return;
  const kind = KIND[row.state] ?? "wait";
  for (const old of [...button.classList]) if (old.startsWith("is-")) button.classList.remove(old);
  button.classList.add(`is-${kind}`);
  button.querySelector(".state").replaceChildren(...inWords(row, at).map((text, index) =>
    el("span", { class: index ? "more" : "word" }, text)));
  const done = row.progress ? row.progress.done / (row.progress.total || 1) : 0;
  button.querySelector(".bar i").style.width = `${Math.round(done * 100)}%`;
  button.title = row.reason || row.error || "";
}

function inWords(row, at) {
  const words = [row.state];
  if (row.progress && kindOf(row) === "live") {
    const { phase, done, total, left } = row.progress;
    words.push(`${phase} ${done}/${total}`.trim());
    if (left !== null) words.push(`${duration(left)} left`);
  } else if (row.since !== null) {
    if (row.reason) words.push(row.reason);
    words.push(duration(Math.max(0, at - row.since)));
  } else if (row.elapsed !== null && kindOf(row) === "done") {
    words.push(duration(row.elapsed));
  } else if (row.error || row.reason) {
    words.push((row.error || row.reason).split("\n", 1)[0]);
  }
  if (row.restarts) words.push(row.restarts > 1 ? `restarted ${row.restarts} times` : "restarted once");
  if (row.attempts > 1) words.push(`attempt ${row.attempts}`);
  return [...words, ...row.warnings.map(each => `! ${each.kind}`)];
}

function kindOf(row) {
  return KIND[row.state] ?? "wait";
}
