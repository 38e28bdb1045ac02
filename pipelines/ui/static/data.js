// The Data page: what prepare read, kept and dropped, how long rows are, and the rows themselves as
// the model reads them. What is shown is in the address: a view is a link.

import { el, get, page, set_state, show_error, state, svg, table, takeTurn } from "./ui.js";
import { draw_rows, named } from "./data_rows.js";
import { visible } from "./visible.js";

const count = value => value.toLocaleString("en");
const share = (part, whole) => (whole ? ` (${(100 * part / whole).toFixed(1)}%)` : "");

async function start() {
  const main = document.querySelector("main");
  await page("data");
  let report;
  try {
    report = await get("/api/data/report");
  } catch (error) {
    main.replaceChildren(el("h1", {}, "Data"), el("p", { class: "empty" }, error.message));
    return;
  }
  const lengths = el("div", { class: "charts", "aria-live": "polite" });
  const dropped = el("div", {});
  const rows = el("div", {});
  const pick = role_picker(report);
  main.replaceChildren(
    el("h1", {}, "Data"), headline(report),
    section("Sources", "Each file in each role, as prepare recorded it in artifacts/data/report.json.",
      sources(report), unused(report)),
    section("Dropped rows", null, reasons(report, () => draw_dropped(dropped, report)), dropped),
    section("Held-out prompts and numbers", "Rows are counted in the files: those of a training role whose prompt "
      + "is also a held-out one. The numbers are those of metrics/prepare.json.",
      el("div", { class: "two" }, overlaps(report), numbers(report))),
    el("section", {}, el("h2", {}, "Lengths"),
      el("p", { class: "intro" }, "In tokens, after the chat template. A row's whole is its prompt with its longest response."),
      el("div", { class: "controls" }, pick.label), lengths),
    section("Rows", "Each token as the model reads it. What is trained on has a line under it.", rows),
  );
  const draw = () => {
    pick.show(current_role(report));
    return Promise.all([
      draw_lengths(lengths, current_role(report)), draw_rows(rows, report, current_role(report), draw),
      draw_dropped(dropped, report),
    ]).catch(show_error);
  };
  pick.on_change(role => { set_state({ role, source: "", text: "", start: "", trail: "" }); draw(); });
  addEventListener("popstate", draw);
  await draw();
  main.dataset.ready = "true";
}

function section(title, intro, ...children) {
  return el("section", {}, el("h2", {}, title), intro ? el("p", { class: "intro" }, intro) : null, children);
}

function current_role(report) {
  const asked = state().role;
  return report.roles.includes(asked) ? asked : report.roles[0];
}

function role_picker(report) {
  const select = el("select", { id: "role" }, report.roles.map(role =>
    el("option", { value: role }, named(role))));
  return {
    label: el("label", { for: "role" }, "Role, here and below", select),
    show: role => { select.value = role; },
    on_change: then => select.addEventListener("change", () => then(select.value)),
  };
}

function headline(report) {
  const sum = name => report.sources.reduce((total, row) => total + row[name], 0);
  const lost = report.sources.reduce((total, row) => total + of_reasons(row), 0);
  return el("p", { class: "intro" },
    `${count(sum("read"))} rows read, ${count(sum("written"))} written, ${count(lost)} dropped. `
    + (report.template ? `Chat template ${report.template}.` : "The tokenizer has no chat template."));
}

const of_reasons = row => Object.values(row.dropped).reduce((total, number) => total + number, 0);

function sources(report) {
  return table([
    { title: "Role", value: row => named(row.role), text: true },
    { title: "Source", value: row => row.source, text: true },
    { title: "Format", value: row => row.format, text: true },
    { title: "Read", value: row => count(row.read) },
    { title: "Kept", value: row => count(row.kept) },
    { title: "Written", value: row => count(row.written) },
    { title: "Dropped", value: row => count(of_reasons(row)) + share(of_reasons(row), row.read) },
    { title: "Why", text: true, value: row => Object.entries(row.dropped)
      .map(([why, number]) => `${count(number)} ${why}`).join(", ") || "–" },
  ], report.sources, { label: "Sources" });
}

function unused(report) {
  if (!report.unused_files.length) return null;
  return el("p", { class: "warning" }, `Read by no role: ${report.unused_files.join(", ")}`);
}

// ---- dropped rows

function reasons(report, draw) {
  const totals = {};
  for (const row of report.sources) {
    for (const [why, number] of Object.entries(row.dropped)) totals[why] = (totals[why] ?? 0) + number;
  }
  if (!Object.keys(totals).length) return el("p", { class: "empty" }, "No row was dropped.");
  const show = reason => { set_state({ reason, from: "" }); draw(); };
  const list = el("ul", { class: "reasons" }, Object.entries(totals).map(([why, number]) => el("li", {},
    el("button", { type: "button", onclick: () => show(why) }, `${count(number)} ${why}`),
    ` ${report.reasons[why] ?? ""}`)));
  return [
    el("p", { class: "intro" }, "prepare records how many; to show which, the files are read and selected from once more."),
    list,
    el("button", { type: "button", onclick: () => show("all") }, "Show all dropped rows"),
  ];
}

async function draw_dropped(place, report) {
  const { reason, from } = state();
  const isLast = takeTurn(place);
  if (reason === undefined) {
    place.replaceChildren();
    return;
  }
  if (!Object.values(report.sources).some(of_reasons)) return;
  place.replaceChildren(el("p", { class: "note" }, "Selecting…"));
  const start = Number(from) || 0;
  let found;
  try {
    found = await get("/api/data/dropped", { reason: reason === "all" ? "" : reason, start });
  } catch (error) {
    if (isLast()) place.replaceChildren(el("p", { class: "warning" }, error.message));
    return;
  }
  if (!isLast()) return;
  const go = to => { set_state({ from: to || "" }); draw_dropped(place, report).catch(show_error); };
  const end = start + found.rows.length;
  place.replaceChildren(
    ...found.notes.map(note => el("p", { class: "warning" }, note)),
    table([
      { title: "Role", value: row => named(row.role), text: true },
      { title: "Place", value: row => `${row.source} ${row.counted} ${row.line}`, text: true },
      { title: "Reason", value: row => el("span", { class: "tag" }, row.reason), text: true },
      { title: "Row", value: row => el("span", { class: "sample dropped" }, visible(row.text)), text: true },
    ], found.rows, { label: "Dropped rows" }),
    el("div", { class: "controls pager" },
      el("button", { type: "button", disabled: start === 0, onclick: () => go(Math.max(start - 20, 0)) }, "Earlier"),
      el("button", { type: "button", disabled: end >= found.num_rows, onclick: () => go(end) }, "Later"),
      el("span", { class: "note" }, found.rows.length
        ? `${count(start + 1)} to ${count(end)} of ${count(found.num_rows)}` : "none")),
  );
}

// ---- overlap, numbers, lengths

function overlaps(report) {
  return table([
    { title: "Training role", value: row => named(row.role), text: true },
    { title: "Rows", value: row => count(row.num_rows) },
    { title: "With a held-out prompt", value: row => (row.num_held_out
      ? el("span", { class: "wrong" }, `✗ ${count(row.num_held_out)}`)
      : el("span", { class: "right" }, "✓ none")) },
  ], report.overlaps, { label: "Overlap with held-out prompts" });
}

function numbers(report) {
  return table([
    { title: "Number", value: ([name]) => name, text: true },
    { title: "Value", value: ([, value]) => value.toLocaleString("en", { maximumFractionDigits: 6 }) },
  ], Object.entries(report.metrics), { label: "Numbers of prepare" });
}

async function draw_lengths(place, role) {
  const isLast = takeTurn(place);
  const { lengths } = await get("/api/data/lengths", { role });
  if (!isLast()) return;
  place.replaceChildren(...lengths.map(histogram));
}

const WIDTH = 340, HEIGHT = 150, LEFT = 8, RIGHT = 8, TOP = 16, BOTTOM = 20;

function histogram(of) {
  const most = Math.max(...of.bins.map(bin => bin.count));
  const across = (WIDTH - LEFT - RIGHT) / of.bins.length;
  const said = `${named(of.role)}, ${of.part}: ${count(of.num_rows)} rows, ${of.least} to ${of.most} tokens, median ${of.median}`;
  const picture = svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": said });
  of.bins.forEach((bin, index) => {
    const height = bin.count / most * (HEIGHT - TOP - BOTTOM);
    picture.append(svg("rect", {
      class: "bar", x: LEFT + index * across, y: HEIGHT - BOTTOM - height,
      width: Math.max(across - 1, 0.5), height,
    }, svg("title", {}, `${bin.low === bin.high ? bin.low : `${bin.low} to ${bin.high}`} tokens: ${count(bin.count)} rows`)));
  });
  picture.append(
    svg("path", { class: "axis", d: `M${LEFT} ${HEIGHT - BOTTOM}H${WIDTH - RIGHT}` }),
    svg("text", { x: LEFT, y: HEIGHT - 5 }, count(of.least)),
    svg("text", { class: "end", x: WIDTH - RIGHT, y: HEIGHT - 5 }, `${count(of.bins.at(-1).high)} tokens`),
    svg("text", { x: LEFT, y: 11 }, `at most ${count(most)} rows`));
  return el("figure", {},
    el("figcaption", {}, el("div", {}, el("h3", {}, of.part)),
      el("div", { class: "note" }, `median ${count(of.median)}, longest ${count(of.most)}, ${count(of.num_tokens)} tokens in all`)),
    picture);
}

start().catch(show_error);
