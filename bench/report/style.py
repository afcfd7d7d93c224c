"""The page's style: light and dark, screen and paper, no font and no file but its own."""

CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --paper: #ffffff; --line: #d0d7de; --band: #f6f8fa;
  --alarm: #a40e26; --alarm-paper: #fff0f0; --accent: #0a58a6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #a0a8b0; --paper: #14171a; --line: #3a4148;
  --band: #1d2226; --alarm: #ff9a93; --alarm-paper: #3a1719; --accent: #7ab8ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 72rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Liberation Sans", Arial, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p, ul { margin: .5rem 0; }
li { margin: .25rem 0; }
a { color: var(--accent); }
code { font: .88em/1.4 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; overflow-wrap: anywhere; }
.soft { color: var(--soft); font-size: .9rem; }
.verdict { padding: .75rem 1.25rem; border: 1px solid var(--line); border-left: .35rem solid var(--accent);
  border-radius: .4rem; background: var(--band); font-size: 1.05rem; }
.verdict h2 { margin: 0; padding: 0; border: 0; }
.alarm { color: var(--alarm); background: var(--alarm-paper); font-weight: 600; padding: .25rem .5rem;
  border-radius: .3rem; }
figure { margin: 1rem 0; padding: .5rem; background: #ffffff; border: 1px solid var(--line); border-radius: .4rem;
  overflow-x: auto; break-inside: avoid; }
figure svg { display: block; width: 100%; min-width: 40rem; height: auto; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { padding: .25rem .5rem; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { background: var(--band); vertical-align: bottom; white-space: normal; font-weight: 600; }
td.figure, th.figure { text-align: right; }
tr.baseline td { font-weight: 600; }
td.long { white-space: normal; min-width: 9rem; }
table.facts td { white-space: normal; overflow-wrap: anywhere; }
details { margin: .75rem 0; }
summary { cursor: pointer; }
@media print { body { max-width: none; padding: 0; font-size: 10pt; } .table, figure { overflow: visible; }
  figure svg { min-width: 0; } table { font-size: 7.5pt; } th, td { padding: .15rem .3rem; } tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; } details::details-content { content-visibility: visible; display: block; } }
"""
