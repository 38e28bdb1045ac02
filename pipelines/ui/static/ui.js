// What every page shares: navigation, requests, drawing. Text becomes text nodes and nothing else,
// so that whatever a log or a sample holds stays text.

const TOKEN = "lockstep-token";
const SVG = "http://www.w3.org/2000/svg";

keepToken();
const letIn = mayChange() ? fetch("/api/reader", posted({})).catch(() => null) : null;

// The token comes in the link that `lockstep ui` prints. It leaves the address bar at once, and the
// tab remembers it; for it the browser is given a cookie, with which its other tabs may read.
function keepToken() {
  const given = /(?:^#|&)token=([^&]+)/.exec(location.hash);
  if (!given) return;
  sessionStorage.setItem(TOKEN, decodeURIComponent(given[1]));
  history.replaceState(null, "", location.pathname + location.search);
}

export function mayChange() {
  return sessionStorage.getItem(TOKEN) !== null;
}

// ---- the frame of a page

export async function page(name) {
  const main = document.querySelector("main");
  main.id = "main";
  main.tabIndex = -1;
  const links = el("nav", { "aria-label": "Pages" });
  const header = el("header", { class: "top" },
    el("a", { class: "brand", href: "/" }, "Lockstep"), links);
  document.body.prepend(el("a", { class: "skip", href: "#main" }, "Skip to the content"), header);
  document.body.append(el("div", { id: "errors", role: "alert" }));
  try {
    const { clone, root, pages } = await get("/api/pages");
    const own = pages.find(each => each.name === name);
    document.title = `${own ? own.title : name} · ${clone} · Lockstep`;
    header.append(el("span", { class: "clone", title: root }, clone));
    links.append(...pages.map(each => el("a", {
      href: `/${each.name}`, "aria-current": each.name === name ? "page" : null,
    }, each.title)));
    return { clone, root, pages };
  } catch (error) {
    show_error(error);
    return { clone: "", root: "", pages: [] };
  }
}

export function show_error(error) {
  const message = error instanceof Error ? error.message : String(error);
  const errors = document.getElementById("errors") ?? document.body;
  for (const shown of errors.querySelectorAll(".error")) {
    if (shown.dataset.message === message) shown.remove();
  }
  const close = el("button", { type: "button", class: "quiet" }, "Dismiss");
  const box = el("div", { class: "error", "data-message": message },
    el("p", { class: "plain" }, message), close);
  close.addEventListener("click", () => box.remove());
  errors.append(box);
}

// ---- requests

export function get(path, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") query.append(name, each);
    }
  }
  const asked = query.toString();
  return request(asked ? `${path}?${asked}` : path, { cache: "no-cache" });
}

export function post(path, body = {}) {
  return request(path, posted(body));
}

function posted(body) {
  return {
    method: "POST",
    headers: {
      "Content-Type": "application/json",
      "X-Lockstep-Token": sessionStorage.getItem(TOKEN) ?? "",
    },
    body: JSON.stringify(body),
  };
}

// What is posted is answered by lines of JSON: `heard` is called with each as it comes.
export async function stream(path, body, heard) {
  const response = await answered(path, posted(body));
  if (!response.ok) await json_of(path, response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  for (;;) {
    const { done, value } = await reader.read().catch(() => {
      throw new Error("the server has ended before its answer did");
    });
    if (done) return;
    const lines = (unread + value).split("\n");
    unread = lines.pop();
    for (const line of lines) heard(JSON.parse(line));
  }
}

async function request(path, options) {
  return json_of(path, await answered(path, options));
}

async function answered(path, options) {
  await letIn;
  try {
    return await fetch(path, options);
  } catch {
    throw new Error("the server does not answer: is `lockstep ui` still running?");
  }
}

async function json_of(path, response) {
  const answer = await response.json().catch(() => null);
  if (!response.ok) {
    throw new Error(answer?.error ?? `${path}: the server answered ${response.status}`);
  }
  return answer;
}

const turns = new WeakMap();

// Answers may come in another order than they were asked for: only the last one that was asked for
// is drawn at a place. Returns whether it still is that one.
export function takeTurn(place) {
  const turn = {};
  turns.set(place, turn);
  return () => turns.get(place) === turn;
}

// ---- the state of a view, in the address

export function state() {
  return Object.fromEntries(new URLSearchParams(location.search));
}

// Values that are empty leave the address. A change can be gone back from unless `replace` is set.
export function set_state(values, { replace = false } = {}) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === undefined || value === "") query.delete(name);
    else query.set(name, value);
  }
  const asked = query.toString();
  const address = location.pathname + (asked ? `?${asked}` : "");
  if (address === location.pathname + location.search) return;
  if (replace) history.replaceState(null, "", address);
  else history.pushState(null, "", address);
}

// ---- drawing

// An element. Attributes that are null or false are left out; functions listen to events ("onclick").
export function el(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name.replace(/^on/, ""), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

// A table that scrolls by itself. Columns: {title, value(row), text: true for words rather than
// numbers}; a value is text or an element.
export function table(columns, rows, { caption = null, label = null } = {}) {
  const kind = column => (column.text ? "text" : null);
  const head = el("tr", {}, columns.map(column =>
    el("th", { scope: "col", class: kind(column) }, column.title)));
  const body = rows.map(row => el("tr", {}, columns.map((column, index) => {
    const tag = index === 0 ? "th" : "td";
    const scope = index === 0 ? "row" : null;
    return el(tag, { scope, class: kind(column) }, column.value(row));
  })));
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label ?? caption ?? "Table" },
    el("table", { class: "numbers" },
      caption ? el("caption", {}, caption) : null,
      el("thead", {}, head), el("tbody", {}, body)));
}

export function number(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 100) return `${minutes} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// Lines over numbers. Series: {name, points: [[x, y], ...], dashed, colour: 0 to 5}. Options:
// {title, note, x: what the axis below counts, warnings: sentences shown in place, limit: {y, text}}.
export function chart(series, options = {}) {
  const drawn = series
    .map(each => ({ ...each, points: each.points.filter(p => p.every(Number.isFinite)) }))
    .filter(each => each.points.length);
  const key = series.length > 1 ? el("div", { class: "key" }, series.map((each, index) =>
    el("span", { class: `b${each.colour ?? index % 6}` },
      svg("svg", { class: "swatch", viewBox: "0 0 22 10", "aria-hidden": "true" },
        svg("path", { class: each.dashed ? "line dashed" : "line", d: "M0 5H22" })),
      each.name))) : null;
  const reading = el("div", { class: "note reading" }, options.note ?? "");
  const warnings = (options.warnings ?? []).map(text => el("p", { class: "warning" }, text));
  const caption = el("figcaption", {}, el("div", {}, el("h3", {}, options.title ?? ""), key), reading);
  if (!drawn.length) {
    return el("figure", {}, caption, el("p", { class: "note" }, "no numbers yet"), warnings);
  }
  return el("figure", {}, caption, lines(drawn, options, reading), warnings);
}

const WIDTH = 340, HEIGHT = 170, LEFT = 44, RIGHT = 8, TOP = 8, BOTTOM = 22;

function lines(series, options, reading) {
  const all = series.flatMap(each => each.points);
  const ys = all.map(point => point[1]).concat(options.limit ? [options.limit.y] : []);
  const [left, right] = span(all.map(point => point[0]), 0);
  const ticks = steps(...span(ys, 0.06));
  const low = ticks[0], high = ticks[ticks.length - 1];
  const across = x => LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT);
  const up = y => HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM);
  const last = series.map(each => `${each.name} ${number(each.points.at(-1)[1])}`).join(", ");
  const picture = svg("svg", {
    class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img",
    "aria-label": `${options.title ?? "Lines"}: ${last} at ${options.x ?? "x"} ${number(right)}`,
  });
  for (const tick of ticks) {
    picture.append(
      svg("path", { class: "grid", d: `M${LEFT} ${up(tick)}H${WIDTH - RIGHT}` }),
      svg("text", { class: "end", x: LEFT - 6, y: up(tick) + 4 }, number(tick)));
  }
  picture.append(
    svg("path", { class: "axis", d: `M${LEFT} ${HEIGHT - BOTTOM}H${WIDTH - RIGHT}` }),
    svg("text", { x: LEFT, y: HEIGHT - 6 }, number(left)),
    svg("text", { class: "end", x: WIDTH - RIGHT, y: HEIGHT - 6 },
      `${options.x ? `${options.x} ` : ""}${number(right)}`));
  if (options.limit) {
    picture.append(svg("path", { class: "limit", d: `M${LEFT} ${up(options.limit.y)}H${WIDTH - RIGHT}` },
      svg("title", {}, options.limit.text)));
  }
  series.forEach((each, index) => {
    const path = each.points.map(([x, y]) => `${across(x).toFixed(1)} ${up(y).toFixed(1)}`).join("L");
    const [x, y] = each.points.at(-1);
    picture.append(svg("g", { class: `b${each.colour ?? index % 6}` },
      svg("path", { class: each.dashed ? "line dashed" : "line", d: `M${path}` }),
      svg("circle", { class: "dot", cx: across(x), cy: up(y), r: 3.5 })));
  });
  const cursor = svg("path", { class: "cursor", d: "" });
  picture.append(cursor);
  const before = reading.textContent;
  picture.addEventListener("pointermove", event => {
    const box = picture.getBoundingClientRect();
    const x = left + ((event.clientX - box.left) / box.width * WIDTH - LEFT)
      / (WIDTH - LEFT - RIGHT) * (right - left);
    const near = series.map(each => nearest(each.points, x));
    cursor.setAttribute("d", `M${across(near[0][0])} ${TOP}V${HEIGHT - BOTTOM}`);
    reading.textContent = `${options.x ?? "x"} ${number(near[0][0])}: ` + series
      .map((each, index) => `${series.length > 1 ? `${each.name} ` : ""}${number(near[index][1])}`)
      .join(", ");
  });
  picture.addEventListener("pointerleave", () => {
    cursor.setAttribute("d", "");
    reading.textContent = before;
  });
  return picture;
}

function nearest(points, x) {
  return points.reduce((best, point) => Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best);
}

function span(values, margin) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low === high) return margin ? [low - (Math.abs(low) || 1) * 0.5, high + (Math.abs(high) || 1) * 0.5] : [low, low + 1];
  const more = (high - low) * margin;
  return [low >= 0 && low - more < 0 ? 0 : low - more, high + more];
}

function steps(low, high) {
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(each => each * power).find(each => each >= rough);
  const ticks = [];
  for (let at = Math.floor(low / step); at * step < high + step; at += 1) ticks.push(Number((at * step).toPrecision(12)));
  return ticks;
}
