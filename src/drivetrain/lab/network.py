"""The namespaces of a lab: made, looked at, emptied, removed. Nothing outside them is touched.

::

    host 0 [eth0 10.77.0.1] ---- [port0]              tbf on eth0 limits what a host sends (up),
    host 1 [eth0 10.77.0.2] ---- [port1] bridge, in   tbf on its port what it receives (down)
    host 2 [eth0 10.77.0.3] ---- [port2] the hub
"""

import json
import os
import signal
import time
from dataclasses import dataclass

from drivetrain.errors import EnvironmentFault
from drivetrain.lab.commands import call
from drivetrain.lab.topology import Topology, burst_bytes

__all__ = ["INTERFACE", "PREFIX", "WireBytes", "Wiring", "existing"]

PREFIX = "drivetrain-lab-"
INTERFACE = "eth0"
"""A host's end of its link."""

_BRIDGE = "bridge0"
_QUEUE = "50ms"
_GONE = ("No such file or directory",)
_END_WITHIN_S = 10.0


@dataclass(frozen=True)
class WireBytes:
    """What a host has sent to, and received from, its link since it was made, headers included."""

    sent: int
    received: int


@dataclass(frozen=True)
class Wiring:
    """Names of the namespaces of the lab ``id``, and what is done with them."""

    id: str
    topology: Topology

    @property
    def hub(self) -> str:
        """Namespace of the bridge."""
        return f"{PREFIX}{self.id}-hub"

    def host(self, number: int) -> str:
        """Namespace of a host."""
        return f"{PREFIX}{self.id}-host{number}"

    @property
    def names(self) -> list[str]:
        """All of them, in the order in which they are made."""
        return [self.hub, *(self.host(number) for number in range(self.topology.hosts))]

    def make(self) -> None:
        """Make all namespaces, links and limits.

        Raises:
            EnvironmentFault: the system refuses; what was made up to there is left for :meth:`remove`.
        """
        call("ip", "netns", "add", self.hub)
        call("ip", "-n", self.hub, "link", "add", _BRIDGE, "type", "bridge", "stp_state", "0")
        call("ip", "-n", self.hub, "link", "set", _BRIDGE, "addrgenmode", "none", "up")
        for number, link in enumerate(self.topology.links):
            host, port = self.host(number), f"port{number}"
            call("ip", "netns", "add", host)
            peer = ("peer", "name", INTERFACE, "netns", host)
            call("ip", "-n", self.hub, "link", "add", port, "type", "veth", *peer)
            # Without addresses of IPv6: gloo takes the first that an interface has.
            call("ip", "-n", self.hub, "link", "set", port, "addrgenmode", "none", "master", _BRIDGE, "up")
            call("ip", "-n", host, "link", "set", INTERFACE, "addrgenmode", "none")
            address = f"{self.topology.address(number)}/24"
            call("ip", "-n", host, "address", "add", address, "dev", INTERFACE)
            call("ip", "-n", host, "link", "set", "lo", "up")
            call("ip", "-n", host, "link", "set", INTERFACE, "up")
            _limit(host, INTERFACE, link.up)
            _limit(self.hub, port, link.down)

    def remove(self) -> None:
        """End every process inside, and remove what there is; what is not there any more is no error.

        Raises:
            EnvironmentFault: a process does not end, or the system refuses.
        """
        there = existing()
        for name in self.names:
            if name in there:
                self._empty(name)
                call("ip", "netns", "delete", name, refused=_GONE)

    def empty(self) -> None:
        """End every process inside.

        Raises:
            EnvironmentFault: one does not end.
        """
        for name in sorted(existing() & set(self.names)):
            self._empty(name)

    def processes(self) -> dict[int, list[int]]:
        """Process ids by number of the host; hosts without any are left out."""
        there = existing()
        found = {
            number: _processes(self.host(number)) if self.host(number) in there else []
            for number in range(self.topology.hosts)
        }
        return {number: processes for number, processes in found.items() if processes}

    def wire_bytes(self) -> list[WireBytes]:
        """By host. What ranks of one host tell each other is not on its link, and not in it."""
        return [_wire_bytes(self.host(number)) for number in range(self.topology.hosts)]

    @staticmethod
    def _empty(name: str) -> None:
        give_up = time.monotonic() + _END_WITHIN_S
        while processes := _processes(name):
            if time.monotonic() > give_up:
                raise EnvironmentFault(
                    f"processes {', '.join(map(str, processes))} in the namespace {name} do not end; they wait for the "
                    "system. Look at them with: ps -o pid,stat,wchan:32,args -p "
                    + ",".join(map(str, processes))
                )
            for process in processes:
                _kill(process)
            time.sleep(0.02)


def existing() -> set[str]:
    """Names of all namespaces of this machine that have one."""
    text = call("ip", "-j", "netns", "list").strip()
    return {str(entry["name"]) for entry in json.loads(text)} if text else set()


def _limit(namespace: str, device: str, rate: int) -> None:
    shape = ("tbf", "rate", f"{rate}bit", "burst", str(burst_bytes(rate)), "latency", _QUEUE)
    call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape)


def _processes(namespace: str) -> list[int]:
    return [int(one) for one in call("ip", "netns", "pids", namespace, refused=_GONE).split()]


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return


def _wire_bytes(host: str) -> WireBytes:
    shown = json.loads(call("ip", "-n", host, "-s", "-j", "link", "show", "dev", INTERFACE))
    counted = shown[0]["stats64"]
    return WireBytes(sent=int(counted["tx"]["bytes"]), received=int(counted["rx"]["bytes"]))
