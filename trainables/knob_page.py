"""docs/knobs.md, made from the table of knobs:

python -m trainables.knob_page > docs/knobs.md
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainables.knob_columns import CALLS, Knob, word
from trainables.knobs import OF_THE_LOOP
from trainables.our_knobs import EVERY, OURS

_HEAD = """\
# Knobs

This page lists every optimisation. `knobs.NAME=VALUE` fixes a knob, `'knobs.NAME=[A,B]'` searches its values, and
`'knobs.NAME={low: A, high: B, log: true}'` searches a range (not for a knob of kind both:
probes need single values). The page is made from the rows in `trainables/loop_knobs.py` and `our_knobs.py`:
`python -m trainables.knob_page > docs/knobs.md`.

- **What it does**, and *by hand*: how a script does it without cardtune.
- **Kind**: a system knob changes speed and memory only, a learning knob changes what is learned, a knob of kind both
  changes both ([design.md](design.md#3-knobs-have-kinds)). `tests/trainables/test_loop.py` and `test_witness.py` verify
  this for system knobs. In a model with batch norm, `micro_batch_size` is of kind both: [a study finds that
  out](faq.md#with-batch-norm-the-micro-batch-changes-what-is-learned).
- **Values**: the default, in bold, then the other values. If nobody sets `micro_batch_size`, your own file and the
  plain defaults train a batch in one piece, whatever the default here.
- **Needs**: requirements on another knob, the device or the machine. A search leaves out values that the device does
  not support, with a sentence why; a value typed on the command line is refused.
- **Try another value if**: the bottleneck of a step for which another value may help. The line `bound by` of a study
  names the bottleneck.
- **Memory**: how the peak memory of a step depends on it. *none*: not at all. *minor*: by a few per cent, which the
  memory guard's margin covers. *group*: each value is measured separately. *switch*: zero and non-zero are measured
  separately. *step*: through the samples of a micro-batch and the gradients that are kept.
- **Read back**: whether the first optimiser step of every run shows that the knob took effect
  (`trainables/witness.py`). If it did not, the study has a note, such as "knobs.sdpa_backend=efficient was asked; the
  first step showed attention by math".
- **Custom loop**: the call of `run` that applies it in [a custom loop](own_loop.md). *any loop*: it is set around the
  training in any loop, also in that of [a framework](frameworks.md). A dash: your own code applies it, and reads it by
  `run["name"]`.

Gains of single knobs on a CPU: [workloads](../benchmarks/results/workloads_cpu_202611.md). Gains on your machine:
`python -m tuning ablate RUN`.

"""
_TABLE = """\
| knob | what it does | kind | values | needs | try another value if | memory | read back | custom loop |
|---|---|---|---|---|---|---|---|---|
"""
_OWN = """
## Knobs of our workloads

A knob exists only in the workloads named in its row. Your own file declares knobs in the same way:

```
from trainables import Knob

class Mine:
    knobs = {
        "channels": Knob(32, "both", values=(16, 32, 64), shapes_model=True),
        "smoothing": Knob(0.1, "learning", low=0.0, high=0.3, shapes_model=True),
        "mirror": Knob(False, "learning"),
    }
```

A knob has a default, a kind and its allowed values; `shapes_model=True` says that `model()` reads it, as
`config.knobs.channels`. It is searched if `default_space` or the command line says so, as in `knobs.channels=[16,32]`,
and best.yaml contains it like the others. A workload has no other knobs than those that it declares and those of the
loop ([the page of the contract](workload.md#knobs-of-your-own)).

"""
_WHERE: Mapping[str | None, str] = {
    "loader": "training waits for samples",
    "augment": "augmentation takes time",
    "transfer": "copies to the device take time",
    "launch": "kernels are many and small",
    "compute": "forward and backward take the time",
    "optimizer": "the optimiser's step takes time",
    "memory": "memory is short",
}
"""By `Span` and `Bound`: when a knob can help, in words."""


def page() -> str:
    """Returns the page as Markdown."""
    return _HEAD + _TABLE + _lines(OF_THE_LOOP) + _OWN + _TABLE + _lines(EVERY.own)


def _lines(rows: Mapping[str, Knob]) -> str:
    return "".join(f"| {' | '.join(_cells(name, row))} |\n" for name, row in rows.items())


def _cells(name: str, row: Knob) -> Iterator[str]:
    yield f"`{name}`"
    whose = [ref for ref, rows in OURS.items() if name in rows.own] or row.acts_in
    by_hand = f" By hand: {row.by_hand}." if row.by_hand else ""
    yield f"{row.doc}{by_hand} ({', '.join(f'`{module}`' for module in whose)})"
    yield row.kind
    others = [word(v) for v in row.domain.values if v != row.default]
    yield f"**{word(row.default)}**, {', '.join(others) if others else row.domain.describe()}"
    needs = [row.requires.words] if row.requires else []
    for rule in row.rules:
        whole = set(rule.values) >= {v for v in row.domain.values if v != row.default}
        needs.append(rule.needs if whole else f"{rule.needs} for {' and '.join(map(word, rule.values))}")
    yield "; ".join(needs) or "-"
    yield "; ".join(_WHERE[part] for part in dict.fromkeys((row.span, *row.remedies)) if part in _WHERE) or "-"
    yield str(row.memory)
    yield "no" if row.seen is None else "yes"
    call = "any loop" if row.asked_by == "around" else CALLS[row.asked_by]
    yield (
        " and ".join(f"`{part.partition('(')[0]}`" if part.startswith("run.") else part for part in call.split(" and "))
        or "-"
    )


if __name__ == "__main__":
    print(page(), end="")
