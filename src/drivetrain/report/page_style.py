"""The style sheet of the pages. No fonts, no pictures, nothing from elsewhere."""

__all__ = ["STYLE"]

STYLE = """
:root{color-scheme:light dark;--paper:#ffffff;--page:#f6f7f9;--ink:#1c2128;--muted:#59636e;
--line:#d8dee4;--grid:#c9d0d8;--good:#116329;--good-bg:#dafbe1;--bad:#b3121d;--bad-bg:#ffe9e8;--doubtful:#7d4e00;--doubtful-bg:#fff4d0;
--accent:#0072b2;--code:#eef1f4;--unexplained:#444444;--strong:#0072b2;--faint:#7fb3d5;--green:#009e73}
@media (prefers-color-scheme:dark){:root{--paper:#161b22;--page:#0d1117;--ink:#e6edf3;--muted:#9aa4af;--line:#30363d;
--grid:#3a424c;--good:#56d364;--good-bg:#12321d;--bad:#ff8b84;--bad-bg:#3d1518;--doubtful:#e3b341;--doubtful-bg:#35270a;
--accent:#58b0e8;--code:#232a33;--unexplained:#8b949e;--strong:#5ab4f0;--faint:#3f6a86;--green:#2fc194}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);line-height:1.5;font-size:15px;
font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}
header,main{max-width:1060px;margin:0 auto;padding:0 1.25rem}
header{padding-top:2rem}
.kind{margin:0;color:var(--muted);font-size:.8rem;letter-spacing:.06em;text-transform:uppercase}
h1{font-size:1.65rem;line-height:1.25;margin:.1rem 0 .4rem;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:0 0 .75rem}
.subtitle{margin:0 0 1rem;color:var(--muted)}
.subtitle span{padding:0 .3rem}
.badge{display:inline-block;vertical-align:middle;font-size:.8rem;font-weight:600;padding:.12rem .6rem;
border-radius:1rem;background:var(--code);color:var(--muted)}
.badge.good{background:var(--good-bg);color:var(--good)}
.badge.bad{background:var(--bad-bg);color:var(--bad)}
.badge.doubtful{background:var(--doubtful-bg);color:var(--doubtful)}
section{background:var(--paper);border:1px solid var(--line);border-radius:10px;padding:1.1rem 1.25rem 1.25rem;
margin:0 0 1.1rem}
nav{display:flex;flex-wrap:wrap;gap:.25rem 1.1rem;margin:1.1rem 0;font-size:.9rem}
a{color:var(--accent);text-decoration:none}
a:hover{text-decoration:underline}
p{margin:.4rem 0}
p.bad,p.doubtful,p.good{padding:.55rem .8rem;border-radius:8px}
p.bad{background:var(--bad-bg);color:var(--bad)}
p.doubtful{background:var(--doubtful-bg);color:var(--doubtful)}
p.good{background:var(--good-bg);color:var(--good)}
p.muted,figcaption,caption,.note{color:var(--muted)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(148px,1fr));gap:.75rem;margin:0 0 1rem}
.tile{background:var(--paper);border:1px solid var(--line);border-radius:10px;padding:.7rem .9rem}
.tile .label{color:var(--muted);font-size:.8rem}
.tile .value{font-size:1.35rem;font-weight:600;font-variant-numeric:tabular-nums;line-height:1.35;
overflow-wrap:anywhere}
.tile .delta{font-size:.8rem;color:var(--muted)}
.scroll{overflow-x:auto;margin:.5rem 0}
table{border-collapse:collapse;width:100%;font-size:.9rem}
caption{text-align:left;padding:0 0 .4rem;font-size:.85rem}
th,td{text-align:left;vertical-align:top;padding:.35rem .9rem .35rem 0;border-bottom:1px solid var(--line)}
th{color:var(--muted);font-weight:600;white-space:nowrap}
tr:last-child td{border-bottom:0}
th.number,td.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.muted{color:var(--muted)}
td.good,dd.good,li.good,.delta.good{color:var(--good)}
td.bad,dd.bad,li.bad,.delta.bad{color:var(--bad)}
td.doubtful,dd.doubtful,li.doubtful,.delta.doubtful{color:var(--doubtful)}
td.bad,td.good{font-weight:600}
.whole{white-space:nowrap}
.note{display:block;font-size:.82rem;font-weight:400;white-space:normal}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:.86em}
code{background:var(--code);border-radius:4px;padding:.08em .35em;overflow-wrap:anywhere}
pre{background:var(--code);border-radius:8px;padding:.8rem 1rem;overflow-x:auto;margin:.5rem 0 0}
dl{display:grid;grid-template-columns:minmax(110px,max-content) 1fr;gap:.3rem 1.2rem;margin:.2rem 0;font-size:.9rem}
dt{color:var(--muted)}
dd{margin:0;overflow-wrap:anywhere}
ul{margin:.4rem 0;padding-left:1.2rem}
figure{margin:.2rem 0 .8rem}
figcaption,.note{line-height:1.4}
.note{overflow-wrap:anywhere}
figcaption{font-size:.85rem;margin-top:.35rem}
figure svg{display:block;width:100%;height:auto;min-width:700px}
details{margin:.6rem 0}
summary{cursor:pointer;color:var(--accent);font-size:.9rem}
details>*:not(summary){margin-top:.5rem}
svg .ink{fill:var(--ink)}
svg .muted{fill:var(--muted)}
svg .grid{fill:var(--grid)}
svg .paper{fill:var(--paper)}
svg .unexplained{fill:var(--unexplained)}
svg .ink-line{stroke:var(--ink)}
svg .muted-line{stroke:var(--muted)}
svg .grid-line{stroke:var(--grid)}
svg .paper-line{stroke:var(--paper)}
svg .strong-line{stroke:var(--strong)}
svg .faint-line{stroke:var(--faint)}
svg .green-line{stroke:var(--green)}
@media (max-width:640px){header,main{padding-left:.75rem;padding-right:.75rem}section{padding:.9rem}
h1{font-size:1.3rem}dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:.45rem}.tiles{grid-template-columns:1fr 1fr}
.scroll table{min-width:0}
thead{display:none}tr{display:block;padding:.5rem 0;border-bottom:1px solid var(--line)}tr:last-child{border-bottom:0}
td,td.number{display:flex;justify-content:space-between;gap:1rem;border:0;padding:.1rem 0;
text-align:right;white-space:normal}
td::before{content:attr(data-label);color:var(--muted);font-weight:400;text-align:left;flex:none;max-width:45%}
td.empty{display:none}.whole{white-space:normal;overflow-wrap:anywhere}}
@media print{body{background:#fff;font-size:11px}nav{display:none}section,figure,.tile{break-inside:avoid}
figure svg{min-width:0}section{border:0;padding:0}}
"""
