// Where the boxes and lines of a lineage go: columns from what came first to what came last, so
// that every line leads to the right. A line that passes a column has a place of its own there,
// which all lines from the same box share; so no line crosses a box.

const SWEEPS = 12;
const SETTLES = 24;

// `nodes`: [{name, width, height}]; `edges`: [[from, to]], without a cycle. Returns {boxes: Map of
// name to {x, y, width, height, column}, lines: [{from, to, points}], width, height}.
export function layout(nodes, edges, { gapX = 56, gapY = 14, lane = 10 } = {}) {
  const columnOf = columns(nodes, edges);
  const items = new Map(nodes.map(node => [node.name, {
    key: node.name, column: columnOf.get(node.name), width: node.width, height: node.height, before: [], after: [],
  }]));
  const paths = edges.map(([from, to]) => ({ from, to, path: path(items, from, to, lane) }));
  const lanes = ordered([...items.values()]);
  settle(lanes, gapY);
  const left = [];
  let x = 0;
  for (const column of lanes) {
    left.push(x);
    x += Math.max(0, ...column.map(item => item.width)) + gapX;
  }
  const widest = lanes.map(column => Math.max(0, ...column.map(item => item.width)));
  const boxes = new Map(nodes.map(({ name }) => {
    const { column, y, width, height } = items.get(name);
    return [name, { x: left[column], y, width, height, column }];
  }));
  const lines = paths.map(({ from, to, path: through }) => ({
    from, to,
    points: through.flatMap((item, index) => {
      const y = item.y + item.height / 2, begin = [left[item.column], y];
      const end = [left[item.column] + (item.width || widest[item.column]), y];
      return index === 0 ? [end] : index === through.length - 1 ? [begin] : [begin, end];
    }),
  }));
  const bottom = Math.max(0, ...[...items.values()].map(item => item.y + item.height));
  return { boxes, lines, width: Math.max(0, x - gapX), height: bottom };
}

// The longest way from a beginning, so that whatever reads something is to its right. What is read
// late moves to just before its first reader.
function columns(nodes, edges) {
  const readers = new Map(nodes.map(({ name }) => [name, []]));
  const sources = new Map(nodes.map(({ name }) => [name, []]));
  for (const [from, to] of edges) {
    readers.get(from).push(to);
    sources.get(to).push(from);
  }
  const inOrder = [], waiting = new Map([...sources].map(([name, all]) => [name, all.length]));
  const ready = nodes.map(node => node.name).filter(name => !waiting.get(name));
  while (ready.length) {
    const name = ready.shift();
    inOrder.push(name);
    for (const next of readers.get(name)) {
      waiting.set(next, waiting.get(next) - 1);
      if (!waiting.get(next)) ready.push(next);
    }
  }
  const found = new Map();
  for (const name of inOrder) found.set(name, Math.max(0, ...sources.get(name).map(one => found.get(one) + 1)));
  for (const name of inOrder.toReversed()) {
    const all = readers.get(name);
    if (all.length && !sources.get(name).length) found.set(name, Math.min(...all.map(one => found.get(one) - 1)));
  }
  return found;
}

// The places that a line goes through; those between its ends are shared by lines of the same box.
function path(items, from, to, lane) {
  const last = items.get(to).column, found = [items.get(from)];
  for (let column = found[0].column + 1; column < last; column += 1) {
    const key = `${from}\n${column}`;
    if (!items.has(key)) items.set(key, { key, column, width: 0, height: lane, before: [], after: [] });
    found.push(items.get(key));
  }
  found.push(items.get(to));
  found.slice(1).forEach((item, index) => {
    if (item.before.includes(found[index])) return;
    item.before.push(found[index]);
    found[index].after.push(item);
  });
  return found;
}

// The columns, each ordered by where its neighbours are, again and again: fewer lines cross.
function ordered(items) {
  const lanes = [];
  for (const item of items) (lanes[item.column] ??= []).push(item);
  const number = () => lanes.forEach(column => column.forEach((item, index) => { item.at = index; }));
  number();
  for (let sweep = 0; sweep < SWEEPS; sweep += 1) {
    const forward = sweep % 2 === 0;
    for (const column of forward ? lanes : lanes.toReversed()) {
      for (const item of column) item.wish = mean((forward ? item.before : item.after).map(one => one.at), item.at);
      column.sort((a, b) => a.wish - b.wish || a.at - b.at);
      column.forEach((item, index) => { item.at = index; });
    }
  }
  return lanes;
}

// From stacked columns, each item moves to the middle of its neighbours as far as order and gaps let it.
function settle(lanes, gap) {
  const room = (one, other) => (one.width && other.width ? gap : gap / 2);
  for (const column of lanes) {
    let y = 0;
    column.forEach((item, index) => {
      if (index) y += room(column[index - 1], item);
      item.y = y;
      y += item.height;
    });
    for (const item of column) item.y -= y / 2;
  }
  for (let round = 0; round < SETTLES; round += 1) {
    for (const column of round % 2 ? lanes.toReversed() : lanes) {
      const wishes = column.map(item => mean([...item.before, ...item.after].map(middle), middle(item)) - item.height / 2);
      place(column, wishes, room);
    }
  }
  const top = Math.min(...lanes.flat().map(item => item.y));
  for (const item of lanes.flat()) item.y -= top;
}

// As near to what is wished as the order allows: items that push one another move as one.
function place(column, wishes, room) {
  const blocks = [];
  column.forEach((item, index) => {
    const offset = index ? column[index - 1].height + room(column[index - 1], item) : 0;
    let block = { items: [item], offsets: [0], size: 1, wish: wishes[index], gap: offset };
    while (blocks.length) {
      const above = blocks.at(-1), reach = above.offsets.at(-1) + block.gap;
      if (above.wish + reach <= block.wish) break;
      blocks.pop();
      block = {
        items: [...above.items, ...block.items],
        offsets: [...above.offsets, ...block.offsets.map(each => each + reach)],
        size: above.size + block.size,
        wish: (above.wish * above.size + (block.wish - reach) * block.size) / (above.size + block.size),
        gap: above.gap,
      };
    }
    blocks.push(block);
  });
  for (const block of blocks) block.items.forEach((item, index) => { item.y = block.wish + block.offsets[index]; });
}

const middle = item => item.y + item.height / 2;

function mean(values, otherwise) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : otherwise;
}
