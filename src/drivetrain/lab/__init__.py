"""A small network on one machine: hosts that share nothing but a wire of a chosen rate.

A host is a network namespace; a pair of virtual interfaces joins each of them to a bridge in a namespace of the lab's
own, and a token bucket filter limits each direction of each link. Ranks that run inside wait for the wire while the
cores compute, so that what overlaps, and what a slow link costs, is measured on real sockets.

Here live the shape of a lab (:mod:`topology`), what this machine lacks for one (:mod:`requirements`), the namespaces
(:mod:`network`), what is written down so that a later command can clean up (:mod:`state`), the processes of a command
(:mod:`processes`) and the lab itself (:mod:`network_lab`). Nothing outside namespaces of the lab's own is ever changed,
and nothing here knows of training: a rank is any command that reads torchrun's environment.
"""

from drivetrain.lab.network_lab import Lab, clean_up, find_lab, known_labs, missing
from drivetrain.lab.processes import LabRun, RankResult
from drivetrain.lab.topology import Link, Topology, format_rate, parse_rate

__all__ = [
    "Lab",
    "LabRun",
    "Link",
    "RankResult",
    "Topology",
    "clean_up",
    "find_lab",
    "format_rate",
    "known_labs",
    "missing",
    "parse_rate",
]
