"""An account as one page of the same kind as a run's report: inline SVG, no JavaScript, nothing fetched."""

from drivetrain.measure.account import CLASSES, Account, RankAccount
from drivetrain.report.blocks import Block, Bullets, Cell, Figure, Paragraph, Report, Table, Tone, section
from drivetrain.report.html_page import html_page
from drivetrain.report.timeline import timeline_svg
from drivetrain.report.waterfall import waterfall_svg, waterfall_text

__all__ = ["account_page"]

_TONES: dict[str, Tone] = {"error": "bad", "warning": "doubtful"}


def account_page(account: Account, title: str) -> str:
    """The whole page."""
    made = account.waterfall
    word = "no MFU" if made is None or made.mfu is None else f"MFU {made.mfu:.1f}"
    window = "no window" if made is None else made.window
    sections = [
        section("Health of the records", lambda: _health(account)),
        section("Waterfall", lambda: _waterfall(account)),
        section("Ranks and steps", lambda: _timeline(account)),
        section("Classes", lambda: [_classes(account)]),
        section("Collectives across ranks", lambda: _collectives(account)),
    ]
    return html_page(Report("account", title, word, "plain", [window], sections))


def _health(account: Account) -> list[Block]:
    if not account.health:
        return [Paragraph("The records show no damage.", "muted")]
    items = [
        Cell(
            f"{finding.severity}: {finding.message}",
            _TONES.get(finding.severity, "muted"),
            f"withheld: {', '.join(finding.affects)}" if finding.affects else "",
        )
        for finding in account.health
    ]
    return [Bullets(items)]


def _waterfall(account: Account) -> list[Block]:
    if account.waterfall is None:
        return [Paragraph("The window has no length, so it has no waterfall.", "muted")]
    svg = waterfall_svg(account.waterfall, "Where the window went")
    return [Figure(svg, waterfall_text(account.waterfall))]


def _timeline(account: Account) -> list[Block]:
    rows = sum(max(len(rank.steps), 1) for rank in account.ranks)
    return [Figure(timeline_svg(account, "Where each step went"), f"{rows} rows of ranks and steps")]


def _classes(account: Account) -> Table:
    """Milliseconds of each class by rank, over everything that was recorded."""
    names = [name for name in CLASSES if any(rank.whole.classes.get(name) for rank in account.ranks)]
    rows = [
        [Cell(name), *(Cell(_ms(rank.whole.classes.get(name, 0))) for rank in account.ranks)]
        for name in names
    ]

    def row(label: str, of: "list[int]") -> list[Cell]:
        return [Cell(label), *(Cell(_ms(value)) for value in of)]

    ranks: tuple[RankAccount, ...] = account.ranks
    rows.append(row("unexplained", [rank.whole.unexplained_ns for rank in ranks]))
    rows.append(row("window", [rank.whole.window_ns for rank in ranks]))
    headings = ["ms", *(f"rank {rank.rank}" for rank in ranks)]
    return Table(headings, rows, frozenset(range(1, len(headings))))


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:,.3f}"


def _collectives(account: Account) -> list[Block]:
    """Nothing for the trace of one rank."""
    blocks: list[Block] = []
    if account.clock_residual_ns is not None:
        residual = f"{account.clock_residual_ns / 1e3:,.1f} µs"
        blocks.append(Paragraph(f"Clocks aligned by collectives, residual {residual}."))
    if account.absent_ranks:
        which = (
            f"rank{'s' if len(account.absent_ranks) > 1 else ''} {', '.join(map(str, account.absent_ranks))}"
        )
        blocks.append(Paragraph(f"No trace of {which}.", "doubtful"))
    if account.stragglers:
        rows = [
            [
                Cell(str(one.rank)),
                Cell(f"{one.times_last:,} of {one.collectives:,}"),
                Cell(f"{one.cost_ns_per_step / 1e6:,.3f}"),
            ]
            for one in account.stragglers
        ]
        headings = ["last to arrive: rank", "times", "cost, ms a step"]
        blocks.append(Table(headings, rows, frozenset({1, 2})))
    return blocks
