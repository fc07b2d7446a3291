"""The shape of a lab: hosts, ranks on each, and the rate of every link in either direction."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.errors import DrivetrainError

__all__ = [
    "MOST_HOSTS",
    "MOST_RANKS_PER_HOST",
    "Link",
    "Topology",
    "format_rate",
    "parse_rate",
]

MOST_HOSTS = 64
MOST_RANKS_PER_HOST = 64
LOWEST_RATE = 10_000
HIGHEST_RATE = 100_000_000_000
"""Bits a second. Above it no virtual link of a machine goes."""

_UNITS = {"": 1, "bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_RATE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,9})?|\.\d{1,9})\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)

_BURST_S = 0.0025
_LEAST_BURST = 128 * 1024
"""Bytes that may pass at once. A packet of the virtual link holds up to 64 KiB, which one bucket must take whole."""


def parse_rate(rate: str | float, where: str = "rate") -> int:
    """Bits a second of ``800mbit``, ``1.5gbit``, ``64kbit`` or a plain number.

    Args:
        where: what the message calls it.

    Raises:
        DrivetrainError: no rate, or one outside 10kbit to 100gbit.
    """
    text = str(rate)
    found = _RATE.fullmatch(text)
    unit = _UNITS.get(found.group(2).lower()) if found else None
    if found is None or unit is None:
        raise DrivetrainError(
            f"{where} {text!r} is no rate; write bits a second as 800mbit, 1.5gbit, 64kbit or 800000000"
        )
    value = round(float(found.group(1)) * unit)
    if not LOWEST_RATE <= value <= HIGHEST_RATE:
        nearest = LOWEST_RATE if value < LOWEST_RATE else HIGHEST_RATE
        raise DrivetrainError(
            f"{where} {text!r} is outside what a link can have; the nearest legal value is {format_rate(nearest)}"
        )
    return value


def format_rate(rate: int) -> str:
    """The shortest way to write a rate that :func:`parse_rate` reads back as it was."""
    for unit in ("gbit", "mbit", "kbit"):
        value = rate / _UNITS[unit]
        text = f"{value:.3f}".rstrip("0").rstrip(".")
        if value >= 1 and round(float(text) * _UNITS[unit]) == rate:
            return f"{text}{unit}"
    return f"{rate}bit"


@dataclass(frozen=True)
class Link:
    """The wire of one host, bits a second.

    Attributes:
        up: from the host.
        down: to it.
    """

    up: int
    down: int

    @staticmethod
    def parse(text: str, where: str = "rate") -> "Link":
        """``RATE`` for both directions, or ``UP/DOWN``.

        Raises:
            DrivetrainError: one of them is no rate.
        """
        up, slash, down = text.partition("/")
        rate = parse_rate(up, where)
        return Link(rate, parse_rate(down, where) if slash else rate)

    def __str__(self) -> str:
        up, down = format_rate(self.up), format_rate(self.down)
        return up if up == down else f"{up}/{down}"


@dataclass(frozen=True)
class Topology:
    """Hosts that all reach each other through their own link.

    Attributes:
        ranks_per_host: processes that a command has on each host; numbered host by host, as torchrun does.
        links: one a host.
    """

    ranks_per_host: int
    links: tuple[Link, ...]

    @staticmethod
    def uniform(
        hosts: int, ranks: int, rate: str | float, links: Mapping[int, str] | None = None
    ) -> "Topology":
        """``hosts`` hosts of ``ranks`` ranks, each behind a link of ``rate``.

        Args:
            rate: ``800mbit``, or ``up/down`` as seen from the host.
            links: other rates, by number of the host.

        Raises:
            DrivetrainError: no such number of hosts or ranks, no rate, or a link of a host that is not there.
        """
        _whole(hosts, 1, MOST_HOSTS, "hosts")
        _whole(ranks, 1, MOST_RANKS_PER_HOST, "ranks on a host")
        common = Link.parse(str(rate))
        others = dict(links or {})
        for host in others:
            if not 0 <= host < hosts:
                raise DrivetrainError(
                    f"link of host {host}: there are {hosts} hosts, numbered from 0; the nearest is "
                    f"{min(max(host, 0), hosts - 1)}"
                )
        return Topology(
            ranks,
            tuple(
                Link.parse(others[host], f"rate of host {host}") if host in others else common
                for host in range(hosts)
            ),
        )

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len(self.links)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.hosts * self.ranks_per_host

    def address(self, host: int) -> str:
        """IPv4 address of a host. Labs do not see each other, so all use the same ones."""
        return f"10.77.0.{host + 1}"

    def host_of(self, rank: int) -> int:
        """Number of the host that ``rank`` is on."""
        return rank // self.ranks_per_host

    def to_document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "ranks_per_host": self.ranks_per_host,
            "links": [{"up": link.up, "down": link.down} for link in self.links],
        }

    @staticmethod
    def from_document(document: Mapping[str, Any]) -> "Topology":
        """From JSON of our own."""
        links = tuple(Link(int(link["up"]), int(link["down"])) for link in document["links"])
        return Topology(int(document["ranks_per_host"]), links)


def burst_bytes(rate: int) -> int:
    """Bytes that a link of ``rate`` lets through at once: 2.5 ms of it, and at least two packets."""
    return max(_LEAST_BURST, round(rate / 8 * _BURST_S))


def _whole(value: int, least: int, most: int, what: str) -> None:
    if not least <= value <= most:
        raise DrivetrainError(
            f"{value} {what}: a lab has {least} to {most}; the nearest legal value is {min(max(value, least), most)}"
        )
