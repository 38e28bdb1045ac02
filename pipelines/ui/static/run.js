import { el, get, page, show_error, table } from "./ui.js";

await page("run");
try {
  const { stages } = await get("/api/run/stages");
  const columns = ["stage", "state", "reason"].map(name => ({ title: name, text: true, value: row => row[name] }));
  document.querySelector("main").replaceChildren(el("h1", {}, "Run"), table(columns, stages));
} catch (error) {
  show_error(error);
}
