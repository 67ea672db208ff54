"""The nodes of a cluster: which may train, of which kind their devices are, and which of them runs the next trial."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tuning.config.errors import StoppedEarly
from tuning.journal.events import Facts
from tuning.memory.oom import Outcome
from tuning.workers.worker_config import Description

SAME_MEMORY_FRAC = 0.02
"""Machines of one kind differ by what firmware and driver keep of their memory."""
EMPTY_S = 120.0
"""How long a search without a node waits for one to join."""


@dataclass(frozen=True)
class Node:
    """A node of a cluster: Ray's id of it, its address, the cores that Ray gives away there, and its device.

    `why` says why no trial runs on it, "" where trials do. `kind` is its kind of device; `cards` are those that Ray
    gives away, None on a CPU; `room_bytes` is what a process may take there, of a card or of RAM. `marks` are custom
    resources of Ray whose names begin with `kind_`: by them a person tells two kinds apart.
    """

    id: str
    address: str
    cores: float
    device: Facts = field(default_factory=dict)
    why: str = ""
    kind: str = ""
    cards: int | None = None
    room_bytes: int | None = None
    marks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Returns its address with the part of its id that tells two of one machine apart."""
        return f"{self.address} ({self.id[:6]})"

    def is_like(self, other: Node) -> bool:
        """Returns whether another node has the same kind of device: what speeds and bytes depend on is the same."""
        ours, theirs = self.device, other.device
        is_same = all(ours.get(n) == theirs.get(n) for n in ("name", "capability", "cores"))
        mine, its = int(ours.get("memory_bytes") or 0), int(theirs.get("memory_bytes") or 0)
        is_as_large = abs(mine - its) <= SAME_MEMORY_FRAC * mine
        return is_same and is_as_large and (self.marks, self.cards) == (other.marks, other.cards)


ToldNode = Callable[[Node], None]
"""Hears of a node that has joined."""


def refusal(here: Description, there: Description) -> str:
    """Returns why no trial may run on a node, "" where trials may: it has other code, data or torch.

    Both are what a worker says of itself there.
    """
    if there.outcome != Outcome.OK:
        return f"the workload cannot be loaded there: {there.message}"
    if here.torch != there.torch:
        return f"its torch is {there.torch}, and {here.torch} on the machine of the run"
    if here.workload_sha256 != there.workload_sha256:
        return "the workload's code there is not that of the machine of the run"
    if here.data_sha256 != there.data_sha256:
        return "the data there are not those of the machine of the run"
    return ""


def kind_of_device(node: Node, known: Sequence[Node]) -> str:
    """Returns the name of a node's kind of device: that of a known node like it, else one that no known node has.

    A new name is made of the node's marks, else of its device, memory and cores.
    """
    like = next((one for one in known if one.is_like(node)), None)
    if like is not None:
        return like.kind
    if node.marks:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(node.marks))[:64]
    else:
        gib = round(int(node.device.get("memory_bytes") or 0) / 2**30)
        said = re.sub(r"[^a-z0-9]+", "-", str(node.device.get("name") or "device").lower()).strip("-")[:32].strip("-")
        cards = f"-{node.cards}x" if node.cards and node.cards > 1 else ""
        name = f"{said}{cards}-{gib}g-{node.device.get('cores')}c"
    while any(one.kind == name for one in known):
        name += "-other"
    return name


class Slots:
    """The slots of nodes, equal on all: where the next trial runs, and which nodes are there.

    `until` is when the search is over, in seconds of the monotonic clock; None: never.
    """

    def __init__(self, nodes: Sequence[Node], until: float | None = None) -> None:
        self._until = math.inf if until is None else until
        self._known = {node.id: node for node in nodes}
        self._nodes = dict(self._known)
        self._at: dict[str, str] = {}
        self._lost: list[Node] = []
        self._empty_at: float | None = None

    @property
    def is_empty(self) -> bool:
        """Returns whether no node is there."""
        return not self._nodes

    @property
    def machines(self) -> int:
        """Returns how many nodes are there."""
        return len(self._nodes)

    def take(self, run: str) -> str:
        """Returns the id of the node on which `run`, a name of its own, takes a slot: the one with most free.

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

    def leave_out(self, node: Node) -> None:
        """Gives no more slots of a node, whose `why` says why."""
        self._nodes.pop(node.id, None)
        self._known[node.id] = node

    def look(self, alive: Iterable[str], joined: Sequence[Node], now: float) -> bool:
        """Takes which nodes are alive and which have joined; returns whether the slots have changed.

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
