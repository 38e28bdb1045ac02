// One policy or two that are asked the same. What they say is text and nothing else. Each goes on
// from its own answer, until one of the two is preferred: then both go on from that.
import { el, get, mayChange, page, post, set_state, show_error, state, stream } from "./ui.js";

const NAME = "lockstep-annotator";
const ENDED = { length: "cut off at the limit", stopped: "stopped" };
const NUMBERS = {
  temperature: { title: "Temperature", min: 0, step: "any" },
  top_p: { title: "Top-p", min: 0, max: 1, step: "any" },
  max_new_tokens: { title: "Max tokens", min: 1, step: 1 },
  seed: { title: "Seed", min: 0, step: 1 },
};

await page("chat");
try {
  start(await get("/api/chat"));
} catch (error) {
  show_error(error);
}

function start({ policies, defaults, annotator }) {
  const kept = state();
  const known = el("datalist", { id: "policies" }, policies.map(name => el("option", { value: name })));
  const policy = (id, title, value, placeholder) => el("input", {
    id, class: "policy", list: "policies", value, placeholder, autocomplete: "off", spellcheck: "false",
    "aria-label": title, onchange: changed,
  });
  const inputs = {
    left: policy("left", "Policy", kept.left ?? policies.at(-1) ?? "", "iter_002 or REV:iter_002"),
    right: policy("right", "Beside it", kept.right ?? "", "none"),
  };
  for (const [name, { title, ...range }] of Object.entries(NUMBERS)) {
    inputs[name] = el("input", {
      id: name, type: "number", value: kept[name] ?? defaults[name], "aria-label": title, onchange: changed, ...range,
    });
  }
  inputs.system = el("input", {
    id: "system", value: kept.system ?? "", placeholder: "none", "aria-label": "System prompt", onchange: changed,
  });
  const labelled = (title, input) => el("label", {}, title, input);

  const sides = el("div", { class: "sides" });
  const question = el("textarea", { id: "question", rows: 2, "aria-label": "Your message", placeholder: "Ask something" });
  const send = el("button", { id: "send", type: "submit", class: "primary" }, "Send");
  const stop = el("button", { id: "stop", type: "button", class: "danger", disabled: true }, "Stop");
  const reset = el("button", { id: "reset", type: "button", onclick: renew }, "New conversation");
  const composer = el("form", { class: "composer" }, question, send, stop, reset);
  const name = el("input", { id: "annotator", value: localStorage.getItem(NAME) ?? annotator, "aria-label": "Your name" });
  const choice = (key, chosen, text) =>
    el("button", { id: `prefer-${chosen}`, type: "button", onclick: () => prefer(chosen) }, text, " ", el("kbd", {}, key));
  const judge = el("div", { class: "judge controls", role: "group", "aria-label": "Which answer is better?", tabindex: -1, hidden: true },
    choice("1", "left", "Left is better"), choice("2", "right", "Right is better"), choice("0", "tie", "Tie"),
    labelled("Your name", name));
  const note = el("p", { id: "note", class: "note", role: "status" });

  document.querySelector("main").replaceChildren(
    el("h1", {}, "Chat"),
    el("p", { class: "intro" }, "A finished policy answers, token by token, in a process of its own; the same seed and ",
      "conversation give the same answer. ", el("kbd", {}, "Enter"), " sends, ", el("kbd", {}, "Shift"), "+",
      el("kbd", {}, "Enter"), " begins a line, ", el("kbd", {}, "Esc"), " stops."),
    known,
    el("div", { class: "options controls" },
      labelled("Policy", inputs.left), labelled("Beside it", inputs.right),
      Object.entries(NUMBERS).map(([key, { title }]) => labelled(title, inputs[key])),
      el("label", { class: "system" }, "System prompt", inputs.system)),
    sides, judge, composer, note);

  let columns = [];
  let busy = false;
  renew();
  question.focus();
  if (!mayChange()) say("This tab may only look: open the link that `lockstep ui` printed to chat.");
  else if (!policies.length) say("No policy is finished yet in this workspace; REV:iter_002 names one of a commit.");

  composer.addEventListener("submit", event => {
    event.preventDefault();
    ask();
  });
  stop.addEventListener("click", halt);
  question.addEventListener("keydown", event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    ask();
  });
  document.addEventListener("keydown", event => {
    if (event.key === "Escape") {
      halt();
      question.focus();
    }
    const typing = event.target.closest("input, textarea");
    if (judge.hidden || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const chosen = { 1: "left", 2: "right", 0: "tie" }[event.key];
    if (!chosen) return;
    event.preventDefault();
    prefer(chosen);
  });

  function say(text) {
    note.textContent = text;
  }

  function changed(event) {
    const { id, value } = event.target;
    const usual = id in defaults ? String(defaults[id]) : "";
    set_state({ [id]: value === usual ? "" : value }, { replace: true });
    if (["left", "right", "system"].includes(id)) renew();
  }

  function renew() {
    halt();
    set_busy(false);
    const system = inputs.system.value ? [{ role: "system", content: inputs.system.value }] : [];
    const names = [inputs.left.value.trim(), inputs.right.value.trim()].filter(Boolean);
    columns = names.map(policy => ({
      policy, messages: [...system], answer: null,
      log: el("div", { class: "log", role: "log", tabindex: 0, "aria-live": "polite", "aria-label": `Conversation with ${policy}` }),
    }));
    sides.replaceChildren(...columns.map(({ policy, log }) =>
      el("section", { class: "side" }, el("h2", { class: "plain" }, policy), log)));
    judge.hidden = true;
    say("");
  }

  function options() {
    const given = Object.keys(NUMBERS).filter(key => inputs[key].value !== "");
    return Object.fromEntries(given.map(key => [key, Number(inputs[key].value)]));
  }

  async function ask() {
    const text = question.value.trim();
    if (!text || busy) return;
    if (!columns.length) return say("Name a policy first.");
    set_busy(true);
    judge.hidden = true;
    say("");
    const asked = columns;
    const wanted = options();
    const was_alike = alike(asked);
    question.value = "";
    const answered = await Promise.all(asked.map(column => turn(column, text, wanted)));
    if (asked !== columns) return; // a new conversation has begun meanwhile
    set_busy(false);
    if (!answered.some(Boolean) && !question.value) question.value = text;
    if (asked.length < 2 || !answered.every(Boolean)) return question.focus();
    if (!was_alike) return say("The two conversations differ by now: begin a new one to compare answers.");
    judge.hidden = false;
    judge.focus();
    say("Press 1, 2 or 0 to save which answer is better, or Esc to go on.");
  }

  // Whether the policy has answered. What it was asked stays only if it has.
  async function turn(column, text, wanted) {
    const words = el("div", { class: "sample" });
    const ended = el("span", { class: "note" }, "waiting for the policy…");
    const asked = message("you", "user", el("div", { class: "sample" }, text));
    const box = message(column.policy, "assistant", words, ended);
    column.log.append(asked, box);
    column.log.setAttribute("aria-busy", "true");
    column.answer = { id: crypto.randomUUID(), box, text: "", done: false };
    const { answer } = column;
    const messages = [...column.messages, { role: "user", content: text }];
    try {
      await stream("/api/chat/answer", { id: answer.id, policy: column.policy, messages, options: wanted }, heard => {
        if (heard.error) throw new Error(heard.error);
        if (heard.said !== undefined) words.textContent = answer.text += heard.said;
        if (heard.said !== undefined) ended.textContent = "";
        if (heard.answer) {
          words.textContent = answer.text = heard.answer.text;
          ended.textContent = [answer.text ? "" : "nothing said", `${heard.answer.num_tokens} tokens`,
            ENDED[heard.answer.finish_reason]].filter(Boolean).join(", ");
          answer.done = true;
        }
        column.log.scrollTop = column.log.scrollHeight;
      });
    } catch (error) {
      asked.remove();
      box.remove();
      show_error(error);
    }
    column.log.setAttribute("aria-busy", "false");
    if (answer.done) column.messages = [...messages, { role: "assistant", content: answer.text }];
    return answer.done;
  }

  function message(who, role, ...content) {
    return el("div", { class: `message ${role}` }, el("div", { class: "who" }, who), content);
  }

  function alike([one, ...others]) {
    return others.every(other => JSON.stringify(other.messages) === JSON.stringify(one.messages));
  }

  function set_busy(value) {
    busy = value;
    send.disabled = value;
    stop.disabled = !value;
  }

  function halt() {
    if (!busy) return;
    for (const { answer } of columns) {
      if (answer && !answer.done) post("/api/chat/stop", { id: answer.id }).catch(show_error);
    }
  }

  async function prefer(chosen) {
    const [left, right] = columns;
    try {
      await post("/api/chat/preference", { left: left.answer.id, right: right.answer.id, chosen, annotator: name.value });
    } catch (error) {
      return show_error(error);
    }
    localStorage.setItem(NAME, name.value);
    const better = chosen === "right" ? right : left;
    if (chosen !== "tie") better.answer.box.classList.add("chosen");
    for (const column of columns) column.messages = [...better.messages];
    judge.hidden = true;
    say(chosen === "tie" ? `Saved: a tie. Both go on from the answer of ${better.policy}.`
      : `Saved: ${better.policy} is better. Both go on from its answer.`);
    question.focus();
  }
}
