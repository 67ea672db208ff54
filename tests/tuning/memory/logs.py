"""Logs of storages for tests: drawn ones, and the traces of a training step of a model that is a formula."""

from __future__ import annotations

from hypothesis import strategies as st

from tuning.memory.prediction import Prediction
from tuning.memory.trace import Event, Trace

KIB, MIB = 2**10, 2**20

sizes = st.one_of(
    st.integers(0, 4 * KIB),
    st.integers(4 * KIB, 2 * MIB),
    st.integers(2 * MIB, 12 * MIB),
    st.integers(8, 40).map(MIB.__mul__),
)


@st.composite
def logs(draw: st.DrawFn, most: int = 60) -> list[Event]:
    """Returns events in a possible order: births of drawn sizes, deaths of any that are alive."""
    events: list[Event] = []
    alive: list[int] = []
    for ident, (size, deaths) in enumerate(draw(st.lists(st.tuples(sizes, st.integers(0, 3)), max_size=most))):
        events.append((ident, size))
        alive.append(ident)
        events.extend((alive.pop(draw(st.integers(0, len(alive) - 1))), -1) for _ in range(min(deaths, len(alive))))
    return events


def step(micro_batch: int, layers: int = 4, *, width_bytes: int = 3 * MIB, sample_bytes: int = 700 * KIB) -> Trace:
    """Returns a step of equal layers: weights, moments, activations, gradients and AdamW's temporaries.

    `width_bytes` is a layer's weights, `sample_bytes` what a layer keeps for a sample.
    """
    events: list[Event] = []
    categories: dict[int, str] = {}
    marks: list[tuple[int, str]] = []
    ops: list[str] = []

    def born(size: int, category: str, op: str) -> int:
        ident = len(categories)
        events.append((ident, size))
        categories[ident] = category
        ops.append(op)
        return ident

    def phase(name: str) -> None:
        marks.append((len(events), name))

    phase("setup")
    for _ in range(layers):
        born(width_bytes, "parameter", "aten::empty")
        born(2 * width_bytes, "optimizer", "aten::zeros_like")
    phase("forward")
    kept = [born(sample_bytes * micro_batch + 100, "activation", "aten::addmm") for _ in range(layers)]
    phase("backward")
    gradients = []
    for ident in reversed(kept):
        flowing = born(sample_bytes * micro_batch // 2 * 2, "temporary", "aten::mm")
        gradients.append(born(width_bytes, "gradient", "aten::mm"))
        events.extend([(ident, -1), (flowing, -1)])
    phase("optimizer")
    roots = [born(width_bytes, "temporary", "aten::_foreach_sqrt") for _ in range(layers)]
    events.extend((ident, -1) for ident in [*roots, *gradients])
    return Trace(micro_batch, tuple(events), categories, tuple(marks), tuple(ops))


def prediction(**kinds: int) -> Prediction:
    """Returns the prediction of `step`, from micro-batches of 2 and 3."""
    return Prediction("traced", (), (step(2, **kinds), step(3, **kinds)))
