// Two responses to one prompt; somebody says which is better, without knowing who made them.

import { el, get, mayChange, number, page, post, show_error } from "./ui.js";

const NAME = "lockstep-annotator";
const KEYS = { 1: "left", ArrowLeft: "left", 2: "right", ArrowRight: "right", 0: "tie", s: "skip" };
const SAID = { left: "You preferred the left one", right: "You preferred the right one",
  tie: "You called it a tie", skip: "You skipped the pair" };

let annotator = localStorage.getItem(NAME) ?? "";
let pair = null;       // what is on the screen
let last = null;       // the last judgement of this tab: what `u` takes back
let busy = false;      // a request is on its way: keys wait for its answer

const view = el("div", {});
const lastLine = el("p", { class: "last", role: "status" });
const agreement = el("section", { class: "agreement" });

await page("annotate");
document.querySelector("main").replaceChildren(el("h1", {}, "Annotate"), view, lastLine, agreement);
document.addEventListener("keydown", pressed);
if (annotator) await next();
else askName();
await showAgreement();

function askName() {
  pair = null;
  const field = el("input", { id: "annotator", value: annotator, maxlength: 64, autocomplete: "off", required: true });
  const form = el("form", { class: "controls" },
    el("label", { for: "annotator" }, "Your name, as judgements will have it"), field,
    el("button", { class: "primary" }, "Begin"));
  form.addEventListener("submit", event => {
    event.preventDefault();
    annotator = field.value;
    last = null;
    lastLine.replaceChildren();
    next();
  });
  view.replaceChildren(form);
  field.focus();
}

async function next() {
  await alone(async () => {
    let found;
    try {
      found = await get("/api/annotate/next", { annotator });
    } catch (error) {
      show_error(error);
      if (!pair) askName();
      return;
    }
    annotator = found.annotator;
    localStorage.setItem(NAME, annotator);
    draw(found.pair, found.progress);
  });
}

function draw(shown, progress) {
  pair = shown;
  const done = progress.num_judged, all = done + progress.num_left;
  const head = [
    el("p", { class: "controls" },
      el("span", { id: "progress" }, `${annotator}: ${done} of ${all} pairs judged`),
      el("button", { type: "button", class: "quiet", onclick: askName }, "Not you?")),
    el("progress", { class: "bar", max: all || 1, value: done, "aria-labelledby": "progress" }),
  ];
  if (!pair) {
    view.replaceChildren(...head, el("p", { class: "empty" }, progress.num_pairs
      ? "Nothing is left for you to judge. To ask about more pairs, run "
      : "The queue is empty. To fill it, run ", el("code", {}, "lockstep annotate queue iter_001"), "."));
    return;
  }
  const side = (where, text, key) => el("div", { class: "side panel" },
    el("pre", { class: "sample plain", tabindex: 0, "aria-label": `The ${where} response` }, text),
    el("button", { type: "button", class: "primary", onclick: () => judge(where), disabled: !mayChange() },
      `The ${where} one is better `, el("kbd", {}, key)));
  const other = (chosen, words, key) => el("button",
    { type: "button", onclick: () => judge(chosen), disabled: !mayChange() }, `${words} `, el("kbd", {}, key));
  view.replaceChildren(...head,
    mayChange() ? "" : el("p", { class: "warning" },
      "This tab may only look: open the link that `lockstep ui` printed to judge."),
    el("div", { class: "asking" }, pair.messages.map(message => el("div", { class: "panel" },
      pair.messages.length > 1 ? el("span", { class: "tag" }, message.role) : null,
      el("div", { class: "plain" }, message.text))),
    pair.tools.length ? el("p", { class: "note" }, `may call: ${pair.tools.join(", ")}`) : null),
    el("div", { class: "sides" }, side("left", pair.left, "1"), side("right", pair.right, "2")),
    el("div", { class: "controls" }, other("tie", "Tie", "0"), other("skip", "Skip", "s"),
      el("span", { class: "note" }, "or the arrow keys")),
    el("div", { class: "note-field" }, el("label", { for: "note" }, "Note, if there is something to say "),
      el("input", { id: "note", maxlength: 2000, autocomplete: "off" })));
}

function pressed(event) {
  const typing = event.target.closest("input, textarea, select");
  if (typing && event.key === "Escape") typing.blur();
  if (typing || event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "u") undo();
  else if (Object.hasOwn(KEYS, event.key) && pair) judge(KEYS[event.key]);
  else return;
  event.preventDefault();
}

async function judge(chosen) {
  const done = await alone(async () => {
    const note = document.getElementById("note")?.value ?? "";
    const answer = await post("/api/annotate/judge", { annotator, pair: pair.id, chosen, note });
    if (answer.judgement) {
      last = answer.judgement;
      tell(last);
    } else {
      show_error(answer.message);
    }
    return true;
  });
  if (done) {
    await next();
    await showAgreement();
  }
}

function tell(judgement) {
  const { left, right, chosen } = judgement;
  const rewards = [left, right].map(each => each.rewards.reward);
  const scored = rewards.every(reward => reward !== undefined)
    ? `; their rewards were ${rewards.map(number).join(" and ")}` : "";
  lastLine.replaceChildren(
    `${SAID[chosen]}: left was of ${left.policy}, right of ${right.policy}${scored}. `,
    el("button", { type: "button", onclick: undo }, "Undo ", el("kbd", {}, "u")));
}

async function undo() {
  if (!last) return;
  const taken = await alone(() => post("/api/annotate/undo", { annotator, judgement: last.id }));
  if (!taken) return;
  last = null;
  lastLine.replaceChildren("The judgement is withdrawn.");
  await alone(async () => {
    const found = await get("/api/annotate/next", { annotator });
    draw(taken.pair ?? found.pair, found.progress);
  });
  await showAgreement();
}

// One request at a time: a key that is pressed twice judges one pair.
async function alone(work) {
  if (busy) return null;
  busy = true;
  try {
    return await work();
  } catch (error) {
    show_error(error);
    return null;
  } finally {
    busy = false;
  }
}

async function showAgreement() {
  try {
    const found = await get("/api/annotate/status");
    const percent = share => `${number(100 * share)}%`;
    const rows = [
      ["The queue", `${found.num_done} of ${found.num_pairs} pairs done, ${found.num_begun} begun`],
      ...found.annotators.map(each => [each.name,
        `${each.num_judged} judged, ${each.num_ties} ties, ${each.num_skips} skips`
        + (each.left_share === null ? "" : `, left ${percent(each.left_share)} of the time`)]),
      ...(found.fleiss.observed === null ? [] : [["Agreement",
        `${percent(found.fleiss.observed)} on ${found.fleiss.num_pairs} pairs, Fleiss' kappa `
        + (found.fleiss.kappa === null ? "undefined" : number(found.fleiss.kappa))]]),
      ...found.sources.map(each => [`People and ${each.name}`,
        `agree on ${each.num_agreeing} of ${each.num_pairs} pairs`]),
    ];
    agreement.replaceChildren(el("h2", {}, "So far"),
      el("dl", { class: "facts" }, rows.map(([what, says]) =>
        el("div", {}, el("dt", {}, what), el("dd", {}, says)))),
      found.notes.map(text => el("p", { class: "warning" }, text)));
  } catch (error) {
    show_error(error);
  }
}
