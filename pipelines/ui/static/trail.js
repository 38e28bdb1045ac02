// The way back through the pages of a search. It finds rows forwards only, so where its pages began
// is kept in the address, as `trail`: what is before a page is there after a reload, too.

const KEPT = 40;

// What is to be in the address for the page after this one, which begins at `next`, and for the one
// before it; null: there is none, or none that is known.
export function beside({ start, trail }, next) {
  const been = (trail ?? "").split("-").filter(Boolean);
  const here = Number(start) || 0;
  return {
    after: next === null ? null : { start: next || "", trail: [...been, here].slice(-KEPT).join("-") },
    before: here && been.length
      ? { start: Number(been.at(-1)) || "", trail: been.slice(0, -1).join("-") } : null,
    first: { start: "", trail: "" },
  };
}
