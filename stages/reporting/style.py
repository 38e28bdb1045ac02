"""The style sheet of the page: light and dark by the reader's preference, narrow screens, print."""

_LIGHT = """
  --page: #f6f7f9; --surface: #ffffff; --raised: #f0f2f5; --rule: #e1e5ea; --axis: #aab2bd;
  --ink: #161b22; --soft: #566170; --faint: #6b7684;
  --accent: #1f5fd0; --right: #12774a; --wrong: #b3382c; --warn: #8a5a00; --warn-fill: #fff6e0;
  --improved: #1f9d63; --regressed: #cf4a3c; --still-wrong: #c3cad3; --still-right: #a9d8c1;
  --b0: #1f5fd0; --b1: #c2570c; --b2: #7a3fb0; --b3: #0f7f86; --b4: #a1286a; --b5: #5d6b13;
"""

_DARK = """
  --page: #0e1116; --surface: #161a21; --raised: #1e242d; --rule: #2a313c; --axis: #566170;
  --ink: #e8ebf0; --soft: #a3adba; --faint: #8a95a3;
  --accent: #7ea8ff; --right: #5cc893; --wrong: #f0877b; --warn: #e6b450; --warn-fill: #2a2415;
  --improved: #3fae7a; --regressed: #d9655a; --still-wrong: #4a5462; --still-right: #2b5f48;
  --b0: #7ea8ff; --b1: #f2a065; --b2: #c49bf0; --b3: #5cc5cb; --b4: #f08fc0; --b5: #bcc95e;
"""

_BASE = """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body {
  margin: 0 auto; padding: 0 28px 48px; max-width: 1168px; background: var(--page);
  color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums;
}
code, .sample, svg.graph text {
  font-family: ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono",
    monospace;
}
a { color: var(--accent); text-underline-offset: 3px; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
h1, h2, h3, p, figure, dl, dd, ul { margin: 0; padding: 0; }
ul { list-style: none; }

.top {
  display: flex; flex-wrap: wrap; gap: 6px 24px; align-items: baseline; padding: 20px 0 60px;
}
.brand { margin-right: auto; font-weight: 650; letter-spacing: -.01em; }
.brand::before {
  content: ""; display: inline-block; width: 9px; height: 9px; margin-right: 9px;
  border-radius: 2px; background: var(--accent);
}
nav { display: flex; flex-wrap: wrap; gap: 4px 18px; }
nav a { color: var(--soft); font-size: 13.5px; text-decoration: none; }
nav a:hover { color: var(--accent); text-decoration: underline; }
h1 {
  max-width: 21em; font-size: clamp(27px, 4.4vw, 43px); line-height: 1.14; font-weight: 680;
  letter-spacing: -.022em; text-wrap: balance;
}
.lead { max-width: 44em; margin-top: 18px; font-size: 17px; text-wrap: pretty; }
.method { margin-top: 8px; color: var(--soft); }
.caveats { max-width: 52em; margin-top: 20px; }
.caveats li {
  margin-top: 8px; padding: 9px 14px; background: var(--warn-fill); font-size: 14px;
  border-left: 3px solid var(--warn); border-radius: 0 6px 6px 0;
}
.warnings {
  max-width: 60em; margin-top: 24px; padding: 16px 18px 14px; background: var(--warn-fill);
  border: 1px solid var(--warn); border-radius: 10px;
}
.warnings h2 { font-size: 16px; color: var(--warn); }
.warnings li { margin: 10px 0; }
.warnings h3 .note { margin-left: 10px; font-weight: 400; }
.warnings .note { color: var(--soft); }

section { margin-top: 60px; }
h2 {
  font-size: 21px; line-height: 1.3; font-weight: 660; letter-spacing: -.012em;
  scroll-margin-top: 16px;
}
h3 { font-size: 14px; line-height: 1.4; font-weight: 620; }
.intro { max-width: 52em; margin: 4px 0 18px; color: var(--soft); }
section > h3 { margin: 32px 0 4px; font-size: 16px; }
section > h3 + .note { margin-bottom: 12px; }
h2 + .scroll, h2 + dl, h2 + .empty { margin-top: 16px; }
.note { color: var(--faint); font-size: 12.5px; line-height: 1.45; }
.empty { color: var(--soft); }

.cards {
  display: grid; grid-template-columns: repeat(6, 1fr); margin-top: 40px; overflow: hidden;
  border: 1px solid var(--rule); border-radius: 10px; background: var(--rule); gap: 1px;
}
.card { padding: 16px 16px 15px; background: var(--surface); }
.card h3 { color: var(--soft); font-size: 12.5px; font-weight: 550; }
.figure {
  margin: 5px 0 3px; font-size: 26px; line-height: 1.2; font-weight: 640;
  letter-spacing: -.02em;
}
.change { font-size: 12.5px; line-height: 1.45; }
.card:first-child .figure { color: var(--accent); }

.charts { display: grid; grid-template-columns: repeat(3, 1fr); gap: 16px; margin-bottom: 16px; }
figure {
  padding: 15px 14px 8px 16px; border: 1px solid var(--rule); border-radius: 10px;
  background: var(--surface);
}
figcaption { min-height: 62px; }
figcaption div {
  display: flex; flex-wrap: wrap; gap: 0 14px; justify-content: space-between;
  align-items: baseline;
}
.key { display: flex; gap: 12px; color: var(--soft); font-size: 12px; }
.swatch { width: 22px; height: 10px; margin-right: 6px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 22px; margin: 0 0 14px; font-size: 13.5px; }
svg.chart { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font-size: 11px; fill: var(--faint); }
svg .end { text-anchor: end; }
svg .middle { text-anchor: middle; }
svg .grid { stroke: var(--rule); stroke-width: 1; }
svg .axis { stroke: var(--axis); stroke-width: 1; }
svg .line {
  fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round;
}
svg .dashed { stroke-dasharray: 2 4.5; }
svg .band { fill: var(--c); fill-opacity: .12; }
svg .dot { fill: var(--c); stroke: var(--surface); stroke-width: 1.5; }
svg .hollow { fill: var(--surface); stroke: var(--c); }
svg text.value {
  fill: var(--c); font-weight: 600; paint-order: stroke; stroke: var(--surface);
  stroke-width: 3px; stroke-linejoin: round;
}
.b0 { --c: var(--b0); } .b1 { --c: var(--b1); } .b2 { --c: var(--b2); }
.b3 { --c: var(--b3); } .b4 { --c: var(--b4); } .b5 { --c: var(--b5); }
"""

_TABLES = """
/* A shadow at the edge past which there is more: the covers above it scroll with the table. */
.scroll {
  overflow-x: auto; border: 1px solid var(--rule); border-radius: 10px;
  background:
    linear-gradient(to right, var(--surface) 40%, transparent) left / 44px 100% local,
    linear-gradient(to left, var(--surface) 40%, transparent) right / 44px 100% local,
    linear-gradient(to right, var(--faint), transparent) left / 12px 100% scroll,
    linear-gradient(to left, var(--faint), transparent) right / 12px 100% scroll,
    var(--surface);
  background-repeat: no-repeat;
}
table { width: 100%; border-collapse: collapse; font-size: 13.5px; line-height: 1.5; }
th, td {
  padding: 9px 14px; border-top: 1px solid var(--rule); text-align: left; vertical-align: top;
  font-weight: 400;
}
thead th { border-top: 0; color: var(--faint); font-size: 12px; vertical-align: bottom; }
tbody th { font-weight: 600; }
.numbers td, .numbers thead th { text-align: right; white-space: nowrap; }
.numbers td.text, .numbers thead th.text { text-align: left; }
.numbers tbody th { white-space: nowrap; }
.numbers thead th { white-space: normal; }
.tag {
  margin-left: 5px; padding: 1px 7px; border-radius: 9px; background: var(--accent);
  color: var(--surface); font-size: 11px; font-weight: 600;
}
.training tbody th { min-width: 250px; white-space: normal; }
.training small {
  display: block; max-width: 54em; color: var(--faint); font-size: 12.5px; font-weight: 400;
  line-height: 1.4;
}
.numbers td small, .samples th small {
  display: block; color: var(--faint); font-size: 12px; font-weight: 400;
}
tr.group th { padding-top: 20px; color: var(--accent); font-weight: 620; }
thead + tbody > tr.group:first-child th { padding-top: 12px; }
.params .default { color: var(--faint); }
code { font-size: 12.5px; }

.columns {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(280px, 1fr)); gap: 24px 40px;
  margin-top: 26px;
}
.facts { margin-top: 6px; font-size: 13.5px; }
.facts div {
  display: flex; justify-content: space-between; gap: 16px; padding: 5px 0;
  border-top: 1px solid var(--rule);
}
.facts dt { color: var(--soft); }

.outcomes { margin-bottom: 16px; }
.bar {
  display: flex; gap: 2px; height: 12px; margin-bottom: 10px; overflow: hidden;
  border-radius: 6px;
}
.outcomes i {
  display: inline-block; width: 10px; height: 10px; margin-right: 7px; border-radius: 3px;
}
.improved { background: var(--improved); }
.regressed { background: var(--regressed); }
.still-wrong { background: var(--still-wrong); }
.still-right { background: var(--still-right); }
.higher-reward { background: var(--improved); }
.lower-reward { background: var(--regressed); }
.same-reward { background: var(--still-wrong); }

.samples {
  table-layout: fixed; overflow: hidden; border: 1px solid var(--rule); border-radius: 10px;
  border-collapse: separate; border-spacing: 0; background: var(--surface); }
.samples thead th:nth-child(1) { width: 24%; }
.samples thead th:nth-child(2) { width: 12%; }
.sample { font-size: 12.5px; line-height: 1.5; white-space: pre-wrap; overflow-wrap: anywhere; }
.samples tbody th .sample { font-weight: 600; }
.mark { display: flex; flex-wrap: wrap; gap: 0 12px; margin-top: 3px; font-size: 12px; }
.right { color: var(--right); font-weight: 600; }
.wrong { color: var(--wrong); font-weight: 600; }
.reward { color: var(--faint); }

#graph ~ .scroll { padding: 20px; }
svg.graph { display: block; width: 100%; min-width: 900px; height: auto; }
.box { fill: var(--raised); stroke: var(--rule); }
.chosen .box { stroke: var(--accent); stroke-width: 1.75; }
svg.graph text { font-size: 11px; }
svg .stage { fill: var(--ink); font-size: 12px; font-weight: 650; }
svg .key { fill: var(--soft); font-size: 12px; }
svg text.out { fill: var(--soft); }
svg text.hash { fill: var(--accent); }
.arrow { fill: none; stroke: var(--axis); stroke-width: 1.25; }
.arrowhead { fill: var(--axis); }

.glossary {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(290px, 1fr)); gap: 16px 36px;
}
.glossary dt { font-weight: 620; font-size: 14px; }
.glossary dd { color: var(--soft); font-size: 13.5px; line-height: 1.5; }
footer {
  margin-top: 64px; padding-top: 16px; border-top: 1px solid var(--rule); color: var(--faint);
  font-size: 12.5px;
}
"""

_NARROW = """
@media (max-width: 1020px) {
  .cards { grid-template-columns: repeat(3, 1fr); }
  .charts { grid-template-columns: repeat(2, 1fr); }
}
@media (max-width: 700px) {
  body { padding: 0 16px 32px; }
  .top { padding-bottom: 36px; }
  section { margin-top: 44px; }
  .cards { grid-template-columns: repeat(2, 1fr); margin-top: 28px; }
  .charts { grid-template-columns: 1fr; }
  figcaption { min-height: 0; margin-bottom: 8px; }
  .numbers th, .numbers td { padding: 8px 9px; }
  .numbers tbody th, .training td:last-child { position: sticky; background: var(--surface); }
  .numbers tbody th { left: 0; }
  .training td:last-child { right: 0; box-shadow: -6px 0 6px -6px var(--faint); }
  .training tbody th { min-width: 150px; }
  .samples, .samples tbody, .samples tr, .samples th, .samples td { display: block; }
  .samples thead { display: none; }
  .samples td { padding-top: 0; border-top: 0; }
  .samples td::before {
    content: attr(data-label); display: block; color: var(--faint); font-size: 12px;
  }
}
@media print {
  body { max-width: none; padding: 0; font-size: 11pt; }
  nav { display: none; }
  .top { padding-bottom: 20px; }
  section { margin-top: 28px; }
  figure, .card, .samples tr, .training tr, .glossary div { break-inside: avoid; }
  h2, h3, .intro, tr.group { break-after: avoid; }
  .scroll { overflow: visible; }
  svg.graph { min-width: 0; }
  .charts { grid-template-columns: repeat(2, 1fr); }
  .cards { grid-template-columns: repeat(3, 1fr); }
  .numbers { font-size: 8.5pt; }
  .numbers th, .numbers td { padding: 5px 7px; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""

STYLE = (
    f"\n:root {{ color-scheme: light dark;{_LIGHT}}}\n"
    f"@media screen and (prefers-color-scheme: dark) {{ :root {{{_DARK}}} }}\n"
    f"{_BASE}{_TABLES}{_NARROW}"
)
