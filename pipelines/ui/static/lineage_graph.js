// A lineage as a graph: boxes from what came first to what came last, each a link to its own
// lineage. One stop of the tab key; arrow keys go along the lines and between the boxes of a column.

import { el, svg } from "./ui.js";
import { layout } from "./lineage_layout.js";

const LETTER = 8.3, PAD = 13, HEIGHT = 46, LONGEST = 30;
const MARGIN = 8;

// `link(node)` is where a box leads.
export function graph(found, down, link) {
  const names = Object.keys(found.nodes);
  const edges = names.flatMap(name => found.steps[name].map(step =>
    ({ from: down ? name : step.to, to: down ? step.to : name, artifacts: step.artifacts })));
  const boxes = names.map(name => ({ name, width: width(texts(found, name)), height: HEIGHT }));
  const placed = layout(boxes, edges.map(({ from, to }) => [from, to]));
  const reading = el("p", { class: "note reading", role: "status" }, USE);
  const lines = new Map(placed.lines.map((line, index) =>
    [line, svg("path", { class: "edge", d: curve(line.points), "data-edge": index })]));
  const drawn = new Map(names.map(name => [name, box(found, name, placed.boxes.get(name), link(found.nodes[name]))]));
  const size = [placed.width + 2 * MARGIN, placed.height + 2 * MARGIN];
  const picture = svg("svg", {
    class: "lineage", width: size[0], height: size[1], role: "group",
    viewBox: `${-MARGIN} ${-MARGIN} ${size[0]} ${size[1]}`,
    "aria-label": `Graph of ${names.length} stages and given files`,
  }, [...lines.values()], [...drawn.values()]);

  function mark(name) {
    for (const [line, path] of lines) path.classList.toggle("near", line.from === name || line.to === name);
    reading.textContent = name ? told(found, edges, name) : USE;
  }
  function focus(name) {
    for (const [each, node] of drawn) node.setAttribute("tabindex", each === name ? 0 : -1);
  }
  for (const [name, node] of drawn) {
    node.addEventListener("pointerenter", () => mark(name));
    node.addEventListener("focus", () => { focus(name); mark(name); });
    node.addEventListener("keydown", event => {
      const next = beside(event.key, name, placed.boxes, edges);
      if (!next) return;
      event.preventDefault();
      drawn.get(next).focus();
    });
  }
  picture.addEventListener("pointerleave", () => mark(null));
  focus(found.root);
  const frame = el("div", { class: "graph-frame" }, picture);
  // What was asked about is in sight, wherever it is.
  requestAnimationFrame(() => {
    const { x, y, width: wide } = placed.boxes.get(found.root);
    frame.scrollTo({ left: x + wide - frame.clientWidth + 2 * MARGIN, top: y - frame.clientHeight / 2, behavior: "instant" });
  });
  return el("div", { class: "lineage-graph" }, frame, reading);
}

const USE = "Each box is a link. Arrow keys go from box to box.";

function texts(found, name) {
  const node = found.nodes[name];
  if (node.given) return [short(node.path), "given"];
  const outs = node.outs.map(out => out.role).join(", ") || "no outputs";
  return [short(node.stage), short(found.cut.includes(name) ? `${outs} · more` : outs)];
}

const short = text => (text.length > LONGEST ? `…${text.slice(1 - LONGEST)}` : text);

function width([title, below]) {
  return Math.ceil(Math.max(title.length * LETTER, below.length * LETTER * 0.84, 60) + 2 * PAD);
}

function box(found, name, { x, y, width: wide, height }, href) {
  const node = found.nodes[name], [title, below] = texts(found, name);
  const kind = name === found.root ? "root" : node.given ? "given" : "made";
  return svg("a", { href, class: `box ${kind}${found.cut.includes(name) ? " cut" : ""}`, "aria-label": node.stage ?? `${node.path}, given` },
    svg("title", {}, node.stage ?? node.path),
    svg("rect", { x, y, width: wide, height, rx: 8 }),
    svg("text", { class: "name", x: x + PAD, y: y + 19 }, title),
    svg("text", { x: x + PAD, y: y + 35 }, below));
}

function curve(points) {
  return points.reduce((path, [x, y], index) => {
    if (!index) return `M${x} ${y}`;
    const [before, height] = points[index - 1];
    if (height === y) return `${path}H${x}`;
    const bend = (x - before) / 2;
    return `${path}C${before + bend} ${height} ${x - bend} ${y} ${x} ${y}`;
  }, "");
}

function told(found, edges, name) {
  const called = each => found.nodes[each].stage ?? found.nodes[each].path;
  const list = (words, all, other) => (all.length
    ? `${words} ${all.map(edge => `${called(edge[other])} (${edge.artifacts.join(", ")})`).join(", ")}` : "");
  const parts = [
    list("from", edges.filter(edge => edge.to === name), "from"),
    list("to", edges.filter(edge => edge.from === name), "to"),
  ].filter(Boolean);
  return `${called(name)}: ${parts.join("; ") || "nothing beyond"}`;
}

// Which box an arrow key leads to: along a line, to the nearest in height, or within the column.
function beside(key, name, boxes, edges) {
  const here = boxes.get(name);
  const near = names => names.toSorted((a, b) => Math.abs(boxes.get(a).y - here.y) - Math.abs(boxes.get(b).y - here.y))[0];
  if (key === "ArrowLeft") return near(edges.filter(edge => edge.to === name).map(edge => edge.from));
  if (key === "ArrowRight") return near(edges.filter(edge => edge.from === name).map(edge => edge.to));
  const sign = { ArrowUp: -1, ArrowDown: 1 }[key];
  if (!sign) return undefined;
  return near([...boxes.keys()].filter(each => {
    const other = boxes.get(each);
    return other.column === here.column && (other.y - here.y) * sign > 0;
  }));
}
