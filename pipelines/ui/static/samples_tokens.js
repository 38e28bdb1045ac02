// A response's tokens, coloured by a number. The number is said, too: in words for the token that
// the pointer or the focus is on, and in a table; the line under a token tells a positive number
// from a negative one.

import { el, number, table } from "./ui.js";
import { address, count, sample } from "./views.js";

const KINDS = {
  advantage: { title: "advantage", of: token => token.advantage, diverges: true },
  logprob: { title: "log-prob of sampling", of: token => token.logprob, diverges: false },
  ratio: {
    title: "log-prob, sampled minus reference", diverges: true,
    of: token => (token.ref_logprob === null || token.logprob === null ? null : token.logprob - token.ref_logprob),
  },
};
const SURPRISE = [-0.05, -0.25, -1, -2.5, -5];
const LEVELS = 3;

export function tokens(found, further) {
  const kinds = Object.keys(KINDS).filter(name => found.tokens.some(t => t.own && KINDS[name].of(t) !== null));
  const reading = el("output", { class: "reading panel" }, "Point at a token, or move with the arrow keys.");
  const legend = el("div", { class: "legend" });
  const turns = el("div", { class: "turns" });
  const select = el("select", { onchange: () => draw() }, kinds.map(name =>
    el("option", { value: name }, KINDS[name].title)));

  function draw() {
    const kind = KINDS[select.value];
    const scale = scaled(kind, found.tokens);
    legend.replaceChildren(...scale.legend);
    turns.replaceChildren(...found.turns
      .map((turn, index) => drawTurn(found, turn, index, scale, reading)).filter(Boolean));
  }

  turns.addEventListener("keydown", event => {
    const all = [...turns.querySelectorAll("[role=option]")];
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -all.length, End: all.length };
    const here = all.indexOf(document.activeElement);
    if (!(event.key in steps) || here < 0) return;
    event.preventDefault();
    all[Math.min(all.length - 1, Math.max(0, here + steps[event.key]))].focus();
  });
  if (!found.tokens.length) return sample("");
  draw();
  const last = found.first_token + found.tokens.length;
  return [
    el("div", { class: "controls" }, kinds.length ? el("label", {}, "Colour: ", select) : null, legend),
    last < found.length || found.first_token ? el("p", { class: "note" },
      `Tokens ${count(found.first_token + 1)} to ${count(last)} of ${count(found.length)} `,
      found.first_token ? el("a", { href: further("") }, "from the start ") : null,
      last < found.length ? el("a", { href: further(last) }, "further") : null) : null,
    turns, reading, numbers(found),
  ];
}

// How a token looks: a class, by the largest number shown; and what the colours mean.
function scaled(kind, all) {
  if (!kind) return { look: () => "", legend: [] };
  const swatch = (look, words) => el("span", { class: "swatch-of" },
    el("span", { class: `token ${look}`, "aria-hidden": "true" }, "ab"), words);
  const looking = look => token => (kind.of(token) === null ? "" : look(kind.of(token)));
  if (!kind.diverges) {
    const look = value => `surprise${SURPRISE.filter(limit => value < limit).length}`;
    const words = [`above ${SURPRISE[0]}`, ...SURPRISE.map((limit, index) =>
      (index + 1 < SURPRISE.length ? `above ${SURPRISE[index + 1]}` : `${limit} or less`))];
    return { look: looking(look), legend: words.map((text, index) => swatch(`surprise${index}`, text)) };
  }
  const shown = all.filter(token => token.own).map(kind.of).filter(value => value !== null);
  const most = shown.reduce((largest, value) => Math.max(largest, Math.abs(value)), 0);
  const look = value => {
    const level = most ? Math.ceil(Math.abs(value) / most * LEVELS) : 0;
    return level === 0 ? "level0" : `${value < 0 ? "minus" : "plus"}${level}`;
  };
  return { look: looking(look), legend: [
    swatch(`minus${LEVELS}`, `to ${number(-most)}`), swatch("minus1", "below 0"), swatch("level0", "0"),
    swatch("plus1", "above 0"), swatch(`plus${LEVELS}`, `to ${number(most)}`),
  ] };
}

function drawTurn(found, turn, index, scale, reading) {
  const start = Math.max(turn.start, found.first_token);
  const stop = Math.min(turn.stop, found.first_token + found.tokens.length);
  if (start >= stop) return null;
  const paid = [
    turn.reward === null ? null : `paid ${number(turn.reward)}`,
    turn.credit === null ? null : `reward of the turn ${number(turn.credit)}`,
  ].filter(Boolean).join(", ");
  const several = found.turns.length > 1;
  const list = el("div", { class: `tokens sample ${turn.role}`, role: "listbox",
    "aria-orientation": "horizontal",
    "aria-label": several ? `Tokens of turn ${index + 1}, ${turn.role}` : "Tokens of the response" });
  const shortened = found.segments.filter(segment => segment.start >= start && segment.start < stop);
  for (let at = start; at < stop; at += 1) {
    const begins = shortened.some(segment => segment.start === at);
    list.append(one(found.tokens[at - found.first_token], at, begins, scale, reading));
  }
  list.firstElementChild.setAttribute("tabindex", "0");
  return el("div", { class: "turn" },
    several ? el("h3", {}, `${index + 1}. ${turn.role}`,
      paid ? el("span", { class: "note" }, ` ${paid}`) : null) : null,
    shortened.map(segment => el("details", {}, el("summary", {},
      `From token ${segment.start + 1} on, ${count(segment.num_read)} tokens were read in place of all before`),
      sample(segment.text))),
    list);
}

function one(token, at, begins, scale, reading) {
  const text = token.text ?? `[${token.id}]`;
  const words = description(token, at, text);
  const look = token.own ? scale.look(token) : "told";
  const node = el("span", { role: "option", tabindex: -1, "aria-selected": "false", "aria-label": words,
    class: `token ${look}${begins ? " begins" : ""}` }, text.replaceAll("\n", "↵\n") || "·");
  const tell = () => { reading.textContent = words; };
  node.addEventListener("pointerenter", tell);
  node.addEventListener("focus", () => {
    tell();
    for (const other of node.parentElement.querySelectorAll("[aria-selected=true]")) {
      other.setAttribute("aria-selected", "false");
    }
    node.setAttribute("aria-selected", "true");
  });
  return node;
}

function description(token, at, text) {
  const said = `Token ${at + 1}, ${JSON.stringify(text)}, id ${token.id}`;
  if (!token.own) return `${said}: read, not said by the policy`;
  const ratio = KINDS.ratio.of(token);
  return `${said}: ` + [
    token.logprob === null ? null : `log-prob ${number(token.logprob)}`,
    token.ref_logprob === null ? null : `reference ${number(token.ref_logprob)}`,
    ratio === null ? null : `difference ${number(ratio)}`,
    token.advantage === null ? null : `advantage ${number(token.advantage)}`,
  ].filter(Boolean).join(", ");
}

function numbers(found) {
  const details = el("details", { class: "as-table" }, el("summary", {}, "The numbers as a table"));
  details.addEventListener("toggle", () => {
    if (!details.open || details.querySelector("table")) return;
    const rows = found.tokens.map((token, index) => ({ ...token, at: found.first_token + index + 1 }));
    details.append(table([
      { title: "Token", text: true, value: each => each.at },
      { title: "Text", text: true, value: each => sample(each.text ?? "", "·") },
      { title: "Id", value: each => each.id },
      { title: "Log-prob", value: each => (each.own ? number(each.logprob) : "read") },
      { title: "Reference", value: each => number(each.ref_logprob) },
      { title: "Advantage", value: each => number(each.advantage) },
    ], rows, { label: "Tokens as a table" }));
  });
  return details;
}
