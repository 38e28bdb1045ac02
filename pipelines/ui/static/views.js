// Views that are links: what is shown follows from the address, and whatever changes it is a link
// or a form, so that going back, reloading and sharing lead to the same view.

import { el, page, show_error } from "./ui.js";

// A path with those of the values that are not empty.
export function address(path, values) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  const asked = query.toString();
  return asked ? `${path}?${asked}` : path;
}

// Draws the page `name` with `draw(values)`, again whenever the address changes. Links and forms
// of the same page do so without loading it anew.
export async function views(name, title, draw) {
  await page(name);
  const main = document.querySelector("main");
  const status = el("p", { class: "note", role: "status" });
  const content = el("div");
  main.replaceChildren(el("h1", {}, title), status, content);
  let latest = 0;

  async function redraw() {
    const number = ++latest;
    status.textContent = "Reading…";
    content.setAttribute("aria-busy", "true");
    try {
      const values = Object.fromEntries(new URLSearchParams(location.search));
      const drawn = await draw(values, redraw);
      if (number === latest) content.replaceChildren(...[drawn].flat(Infinity).filter(Boolean));
    } catch (error) {
      if (number === latest) {
        content.replaceChildren();
        show_error(error);
      }
    }
    if (number === latest) {
      status.textContent = "";
      content.removeAttribute("aria-busy");
    }
  }

  function go(to) {
    history.pushState(null, "", to);
    for (const old of document.querySelectorAll("#errors .error")) old.remove();
    return redraw();
  }

  main.addEventListener("click", event => {
    const link = event.target.closest?.("a");
    const plain = !(event.ctrlKey || event.metaKey || event.shiftKey || event.altKey || event.button);
    if (!link || !plain || link.getAttribute("target")) return;
    const to = new URL(link.getAttribute("href"), location);  // of a link in a picture, too
    if (to.origin !== location.origin || to.pathname !== location.pathname || to.hash) return;
    event.preventDefault();
    go(to).then(() => scrollTo(0, 0));
  });
  main.addEventListener("submit", event => {
    event.preventDefault();
    const values = Object.fromEntries(new FormData(event.target));
    go(address(location.pathname, values));
  });
  addEventListener("popstate", redraw);
  await redraw();
}

// A form whose fields become the address; `kept` goes along unseen.
export function form(label, kept, fields, clear) {
  const hidden = Object.entries(kept).filter(([, value]) => value)
    .map(([name, value]) => el("input", { type: "hidden", name, value }));
  return el("form", { class: "filters panel", "aria-label": label }, hidden, fields,
    el("div", { class: "controls" },
      el("button", { type: "submit", class: "primary" }, "Show"),
      el("a", { class: "button", href: clear }, "Clear")));
}

export function field(label, control) {
  return el("label", { class: "field" }, el("span", {}, label), control);
}

export function input(label, name, values, attributes = {}) {
  return field(label, el("input", { name, value: values[name] ?? "", ...attributes }));
}

// Choices are [value, words].
export function choice(label, name, values, choices) {
  const known = choices.some(([value]) => value === (values[name] ?? ""));
  const all = known ? choices : [...choices, [values[name], values[name]]];
  return field(label, el("select", { name }, all.map(([value, words]) =>
    el("option", { value, selected: value === (values[name] ?? "") }, words))));
}

// Two limits of one number.
export function range(label, name, values, step) {
  const limit = (end, words) => el("input", {
    type: "number", step, name: `${name}_${end}`, value: values[`${name}_${end}`] ?? "",
    "aria-label": `${label}, ${words}`, placeholder: words,
  });
  return el("fieldset", { class: "field range" }, el("legend", {}, label),
    limit("min", "from"), limit("max", "to"));
}

export function count(value) {
  return value.toLocaleString("en");
}

// Where one is among the rows, and links to others: [words, address or null].
export function pager(words, links) {
  return el("nav", { class: "pager", "aria-label": "Rows" }, el("p", { class: "place" }, words),
    links.map(([title, to]) => to && el("a", { class: "button", href: to }, title)));
}

// What the data expect; nothing where they do not say.
export function expected(answer) {
  if (answer === null) return null;
  return el("div", { class: "expected" }, el("span", { class: "note" }, "expected "), sample(answer));
}

// Text as it was written, apart from what surrounds it, whatever direction its letters have.
export function sample(text, empty = "(empty)") {
  const shown = text === "" || text === null ? empty : text;
  // A long one scrolls by itself, so the keyboard has to reach it.
  const long = shown.length > 1500;
  return el("div", { class: `sample isolated${long ? " long" : ""}`, dir: "auto", tabindex: long ? 0 : null }, shown);
}
