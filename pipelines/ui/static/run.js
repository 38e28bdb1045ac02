// The Run page: connects what the server says of the stages with the graph, the chosen stage and
// the buttons.

import { el, get, mayChange, page, post, set_state, show_error, state } from "./ui.js";
import { KIND, drawGraph, markNeighbours, tickClocks } from "./run_graph.js";
import { drawStage } from "./run_stage.js";
import { drawPlan } from "./run_plan.js";
import { drawIterations } from "./run_iterations.js";

const REFRESH_MS = 2000;
const RETRY_MS = 1500;
const LIVE = ["queued", "starting", "running", "suspended"];

const view = { rows: new Map(), pipeline: null, version: null, ahead: 0, detail: null, asked: 0, stream: null, asking: new Set() };
const connection = el("span", { class: "connection", role: "status" }, "connecting…");
const counts = el("p", { class: "counts" });
const said = el("p", { class: "note said", role: "status" });
const problems = el("div", { class: "problems" });
const output = el("details", { class: "output" }, el("summary", {}, "What the command says"), el("pre", { class: "log", tabindex: 0 }));
const profile = el("select", { id: "profile" });
const run = el("button", { type: "button", class: "primary", onclick: () => start("report") }, "Run");
const plan = el("button", { type: "button", onclick: showPlan }, "Plan");
const cancel = el("button", { type: "button", class: "danger", onclick: () => end(null) }, "Cancel");
const planned = el("section", { class: "panel", hidden: true, "aria-label": "Plan" });
const graph = el("div", { class: "graph" }, el("p", { class: "empty" }, "Reading the graph…"));
const stage = el("section", { class: "stage-view", hidden: true, "aria-label": "Stage" });
const over = el("section", { class: "over", hidden: true, "aria-label": "Over the iterations" });

await page("run");
document.querySelector("main").replaceChildren(
  el("div", { class: "title" }, el("h1", {}, "Run"), connection),
  counts,
  el("div", { class: "controls" }, run, plan, cancel,
    el("label", { for: "profile" }, "with profile"), profile),
  said, problems, output, planned, graph, stage, over);
if (!mayChange()) {
  for (const button of [run, cancel]) button.disabled = true;
  said.textContent = "This tab may only look: the link that `lockstep ui` printed has what it takes to run and cancel.";
}
output.hidden = true;
addEventListener("popstate", () => choose(state().stage ?? null, false));
document.addEventListener("visibilitychange", connect);
fillProfiles();
await readAll();
connect();
setInterval(tick, REFRESH_MS);

// ---- what the server says

async function readAll() {
  try {
    take(await get("/api/run/stages"));
  } catch (error) {
    show_error(error);
  }
}

// A tab that nobody sees lets go of its stream: browsers grant a server only a few.
function connect() {
  view.stream?.close();
  view.stream = null;
  if (document.hidden) return;
  const stream = new EventSource(`/api/run/events?since=${encodeURIComponent(view.version ?? "")}`);
  view.stream = stream;
  stream.onopen = () => say("live", "live");
  stream.onmessage = event => take(JSON.parse(event.data));
  stream.onerror = () => {
    say("lost", "no connection; trying again…");
    if (stream.readyState === EventSource.CLOSED) setTimeout(connect, RETRY_MS);
  };
}

function say(kind, text) {
  connection.className = `connection ${kind}`;
  if (connection.textContent !== text) connection.textContent = text;
}

function take(change) {
  view.version = change.version;
  view.ahead = change.now - Date.now() / 1000;
  if (view.pipeline && !change.pipeline && mayChange()) said.textContent = "";
  view.pipeline = change.pipeline;
  if (change.whole) view.rows.clear();
  for (const row of change.stages) view.rows.set(row.stage, row);
  drawGraph(graph, view.rows, change, { chosen: state().stage, choose, now });
  drawHead(change);
  showIterations();
  const chosen = state().stage;
  if (!chosen) return;
  if (!view.detail || change.stages.some(row => row.stage === chosen)) choose(chosen, false);
  else draw(view.rows.get(chosen));
}

function now() {
  return Date.now() / 1000 + view.ahead;
}

function drawHead({ problems: found, pipeline, output: text }) {
  const states = new Map();
  for (const row of view.rows.values()) states.set(row.state, (states.get(row.state) ?? 0) + 1);
  counts.replaceChildren(
    ...[...states].map(([name, count]) => el("span", {}, el("strong", {}, count), ` ${name}`)),
    pipeline ? el("span", { class: "pipeline" }, `${pipeline.command} (process ${pipeline.pid})`) : "");
  problems.replaceChildren(...found.map(each => el("p", { class: "warning plain" }, each)));
  drawButtons();
  output.hidden = !text;
  if (text) output.querySelector("pre").textContent = text.lines.join("\n");
}

// A button waits for the answer to what it asked; the answer may come after the news of its effect.
function drawButtons() {
  const busy = Boolean(view.pipeline) || [...view.rows.values()].some(row => LIVE.includes(row.state));
  run.disabled = !mayChange() || Boolean(view.pipeline) || view.asking.has(run);
  cancel.disabled = !mayChange() || !busy || view.asking.has(cancel);
}

// ---- what is done here

async function fillProfiles() {
  try {
    const { profiles, default: usual } = await get("/api/run/profiles");
    profile.replaceChildren(...profiles.map(name =>
      el("option", { value: name, selected: name === usual }, name)));
  } catch (error) {
    show_error(error);
  }
}

async function start(target) {
  await ask(() => post("/api/run/start", { target, profile: profile.value || null }), run);
}

async function end(name) {
  await ask(() => post("/api/run/cancel", { stage: name }), cancel);
}

async function ask(request, button) {
  view.asking.add(button);
  drawButtons();
  said.textContent = "…";
  try {
    said.textContent = (await request()).said;
  } catch (error) {
    said.textContent = "";
    show_error(error);
  } finally {
    view.asking.delete(button);
    drawButtons();
  }
}

async function showPlan() {
  plan.disabled = true;
  try {
    drawPlan(planned, await get("/api/run/plan", { profile: profile.value }));
  } catch (error) {
    show_error(error);
  } finally {
    plan.disabled = false;
  }
}

// A stage that has ended may have a number for them, and one that warns a line.
async function showIterations() {
  const rows = [...view.rows.values()];
  const ended = JSON.stringify(rows.map(row => [row.stage, KIND[row.state] === "done", row.warnings.length]));
  if (view.ended === ended) return;
  view.ended = ended;
  try {
    const { groups } = await get("/api/run/iterations");
    if (view.ended === ended) drawIterations(over, groups);
  } catch (error) {
    view.ended = null;
    show_error(error);
  }
}

// ---- the stage that was chosen

async function choose(name, byHand = true) {
  if (byHand) set_state({ stage: name });
  markNeighbours(view.rows, name);
  const row = name && view.rows.get(name);
  stage.hidden = !row;
  if (!row) {
    view.detail = null;
    return;
  }
  if (view.detail?.stage !== name) view.detail = null;
  draw(row);
  if (byHand) stage.scrollIntoView({ block: "nearest" });
  const asked = ++view.asked;
  try {
    const detail = await get("/api/run/stage", { stage: name });
    if (asked !== view.asked) return;
    view.detail = detail;
    draw(view.rows.get(name) ?? row);
  } catch (error) {
    if (byHand) show_error(error);
  }
}

function draw(row) {
  drawStage(stage, row, view.detail, {
    now, choose, mayChange: mayChange(), busy: Boolean(view.pipeline), needed: [...view.rows.values()].filter(each => each.needs.includes(row.stage)),
    start: () => start(row.stage), end: () => end(row.stage), close: () => choose(null),
  });
}

// Clocks go on, and so does the log of a job that reports no steps.
function tick() {
  const row = view.rows.get(state().stage ?? "");
  tickClocks(view.rows, now());
  if (row && LIVE.includes(row.state) && !document.hidden && view.stream) choose(row.stage, false);
}
