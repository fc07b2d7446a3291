"""An account as one HTML file: inline SVG, no JavaScript, nothing fetched. Opens from mail and artefact stores."""

from html import escape

from drivetrain.measure.account import CLASSES, Account
from drivetrain.report.svg import legal
from drivetrain.report.timeline import timeline_svg
from drivetrain.report.waterfall import waterfall_svg

__all__ = ["account_page"]

_STYLE = """
body{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;max-width:960px;margin:2rem auto;
padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:.5rem 0 1.5rem}
th,td{padding:.2rem .8rem .2rem 0;text-align:right;font-variant-numeric:tabular-nums}
th:first-child,td:first-child{text-align:left}
thead th{border-bottom:1px solid #999}
.error{color:#b00020}.warning{color:#8a5a00}.note{color:#555}
svg{max-width:100%;height:auto}
"""


def account_page(account: Account, title: str) -> str:
    """The whole page."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        _health(account),
    ]
    if account.waterfall is not None:
        parts += ["<h2>Waterfall</h2>", waterfall_svg(account.waterfall, "Where the window went")]
    parts += ["<h2>Ranks and steps</h2>", timeline_svg(account, "Where each step went")]
    parts += ["<h2>Classes</h2>", _classes(account)]
    if account.collectives or account.stragglers or account.absent_ranks:
        parts += ["<h2>Collectives across ranks</h2>", _collectives(account)]
    parts.append("</body></html>")
    return legal("\n".join(parts) + "\n")


def _health(account: Account) -> str:
    if not account.health:
        return "<p>The records show no damage.</p>"
    items = "".join(
        f'<li class="{escape(finding.severity)}">{escape(finding.severity)}: {escape(finding.message)}'
        f"{escape(_withheld(finding.affects))}</li>"
        for finding in account.health
    )
    return f"<h2>Health of the records</h2><ul>{items}</ul>"


def _withheld(affects: tuple[str, ...]) -> str:
    return f" (withheld: {', '.join(affects)})" if affects else ""


def _classes(account: Account) -> str:
    names = [name for name in CLASSES if any(rank.whole.classes.get(name) for rank in account.ranks)]
    head = "".join(f"<th>rank {rank.rank}</th>" for rank in account.ranks)
    rows = [
        f"<tr><td>{escape(name)}</td>"
        + "".join(f"<td>{_ms(rank.whole.classes.get(name, 0))}</td>" for rank in account.ranks)
        + "</tr>"
        for name in names
    ]
    for label, attribute in (("unexplained", "unexplained_ns"), ("window", "window_ns")):
        cells = "".join(f"<td>{_ms(getattr(rank.whole, attribute))}</td>" for rank in account.ranks)
        rows.append(f"<tr><td>{label}</td>{cells}</tr>")
    return f"<table><thead><tr><th>ms</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:,.3f}"


def _collectives(account: Account) -> str:
    rows = "".join(
        f"<tr><td>{straggler.rank}</td><td>{straggler.times_last} of {straggler.collectives}</td>"
        f"<td>{straggler.cost_ns_per_step / 1e6:,.3f}</td></tr>"
        for straggler in account.stragglers
    )
    residual = account.clock_residual_ns
    clock = (
        ""
        if residual is None
        else f"<p>Clocks aligned by collectives, residual {residual / 1e3:,.1f} µs.</p>"
    )
    absent = (
        f"<p>No trace of rank{'s' if len(account.absent_ranks) > 1 else ''} "
        f"{', '.join(map(str, account.absent_ranks))}.</p>"
        if account.absent_ranks
        else ""
    )
    return (
        f"{clock}{absent}<table><thead><tr><th>last to arrive: rank</th><th>times</th>"
        f"<th>cost, ms a step</th></tr></thead><tbody>{rows}</tbody></table>"
    )
