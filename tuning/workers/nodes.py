"""The nodes of a cluster: which are like the machine of the study, and which of them runs the next trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuning.config.errors import StoppedEarly

SAME_MEMORY_FRAC = 0.02
"""Machines of one kind differ by what firmware and driver keep of their memory."""
EMPTY_S = 120.0
"""How long a search without a node waits for one to join."""


@dataclass(frozen=True)
class Node:
    """A node of a cluster: Ray's id of it, its address, the cores that Ray gives away there, and its device.

    `why` says in what it is unlike the machine of the study, "" where it is like it: only then trials run on it.
    """

    id: str
    address: str
    cores: float
    device: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""

    @property
    def name(self) -> str:
        """Returns its address with the part of its id that tells two of one machine apart."""
        return f"{self.address} ({self.id[:6]})"


ToldNode = Callable[[Node], None]
"""Hears of a node that has joined."""


def difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """Returns in what a node is unlike the machine of the study, "" where trials may run there.

    Both are what a worker says of itself there (`Session.describe`), with the version of torch and the number of cards,
    None on a CPU; `fault` stands for all of it where the workload cannot be loaded.
    """
    if there.get("fault"):
        return f"the workload cannot be loaded there: {there['fault']}"
    ours, theirs = here["device"], there["device"]
    pairs = [
        ("its device is", ours.get("name"), theirs.get("name")),
        ("its compute capability is", ours.get("capability"), theirs.get("capability")),
        ("its cores are", ours.get("cores"), theirs.get("cores")),
        ("its cards are", here.get("cards"), there.get("cards")),
        ("its torch is", here.get("torch"), there.get("torch")),
    ]
    unlike = next((pair for pair in pairs if pair[1] != pair[2]), None)
    if unlike is not None:
        said, mine, other = unlike
        return f"{said} {other}, and {mine} on the machine of the study"
    mine, other = int(ours.get("memory_bytes") or 0), int(theirs.get("memory_bytes") or 0)
    if abs(mine - other) > SAME_MEMORY_FRAC * mine:
        return f"its memory is {other / 2**30:.1f} GiB, and {mine / 2**30:.1f} GiB on the machine of the study"
    for name, what in (("workload_sha256", "the workload's code there is"), ("data_sha256", "the data there are")):
        if here.get(name) != there.get(name):
            return f"{what} not {'those' if what.endswith('are') else 'that'} of the machine of the study"
    return ""


def as_ran_there(found: Mapping[str, Any], node: Node, now: float) -> dict[str, Any]:
    """Returns a trial's last state with the name of its node, its moments by the clock here, which says `now`."""
    shift_s = now - float(found.get("returned_at") or now)
    moments = ("first_step_at", "last_step_at", "returned_at")
    return {**found, "node": node.name, **{name: found[name] + shift_s for name in moments if found.get(name)}}


class Slots:
    """The slots of equal nodes, `a_node` on each: where the next trial runs, and which nodes are there.

    `until` is when the search is over, in seconds of the monotonic clock; None: never.
    """

    def __init__(self, nodes: Sequence[Node], a_node: int, until: float | None = None) -> None:
        self.a_node = a_node
        self._until = math.inf if until is None else until
        self._known = {node.id: node for node in nodes}
        self._nodes = dict(self._known)
        self._at: dict[str, str] = {}
        self._lost: list[Node] = []
        self._empty_at: float | None = None

    @property
    def machines(self) -> int:
        """Returns how many nodes there are."""
        return len(self._nodes)

    def take(self, run: str) -> str:
        """Returns the id of the node on which `run`, a name of its own, takes a slot: the one with most that are free.

        Raises RuntimeError where no node is left.
        """
        if not self._nodes:
            raise RuntimeError("no node is left")
        taken = list(self._at.values())
        node = min(self._nodes, key=taken.count)
        self._at[run] = node
        return node

    def at(self, run: str) -> Node | None:
        """Returns the node of a run, be it lost or not, None where it has no slot."""
        return self._known.get(self._at.get(run, ""))

    def free(self, run: str) -> Node | None:
        """Takes back the slot of a run; returns its node, as `at` does."""
        return self._known.get(self._at.pop(run, ""))

    def stranded(self) -> set[str]:
        """Returns the runs whose node is lost."""
        return {run for run, node in self._at.items() if node not in self._nodes}

    def has(self, node: Node) -> bool:
        """Returns whether a node is there."""
        return node.id in self._nodes

    def look(self, alive: Iterable[str], joined: Sequence[Node], now: float) -> bool:
        """Takes which nodes are alive and which equal ones have joined; returns whether the slots have changed.

        Raises StoppedEarly where none has been there for `EMPTY_S`, or none is when the search is over.
        """
        left = set(alive)
        lost = [node for node in self._nodes.values() if node.id not in left]
        for node in lost:
            del self._nodes[node.id]
        new = {node.id: node for node in joined if node.id in left and node.id not in self._known}
        self._known |= new
        self._nodes |= new
        self._lost += lost
        if self._nodes:
            self._empty_at = None
        elif self._empty_at is None:
            self._empty_at = now
        if self._empty_at is not None and now >= min(self._empty_at + EMPTY_S, self._until):
            names = " and ".join(node.name for node in self._lost)
            what = f"{names} {'was' if len(self._lost) == 1 else 'were'} lost, and no node is left"
            raise StoppedEarly(what, remedy="go on with resume=, once the cluster is there again")
        return bool(lost or new)
