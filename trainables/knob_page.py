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

Every optimisation and what is known of it. `knobs.NAME=VALUE` fixes one, `'knobs.NAME=[A,B]'` searches its values,
`'knobs.NAME={low: A, high: B, log: true}'` a range (of a knob of kind both only with `search.strategy=joint`, since
probes need single values). This page is made from the rows in
`trainables/loop_knobs.py` and `our_knobs.py`: `python -m trainables.knob_page > docs/knobs.md`.

- **What it does**, and *by hand*: how a script without cardtune has it.
- **Kind**: a system knob changes speed and memory only, a learning knob what is learned, one of kind both changes both
  ([design.md](design.md#3-knobs-have-kinds)). Tests hold the system ones to it: `tests/trainables/test_loop.py` and
  `test_witness.py`. A net with batch norm, say, makes `micro_batch_size` both: [a study finds that
  out](faq.md#with-batch-norm-the-micro-batch-changes-what-is-learned).
- **Values**: the default comes first, in bold; then what else it may be. Where nobody sets `micro_batch_size`, a file
  of your own and the plain defaults train a batch in one piece, whatever stands here.
- **Needs**: what another knob, the device or the machine must have for it; values that the device cannot honour are
  left out of a search, with a sentence why; typed ones are refused.
- **Try another value where**: what takes the time or the memory of a step where another value may help. The line
  `bound by` of a study names it.
- **Memory**: how the peak memory of a step depends on it. *none*: not at all. *minor*: by a few per cent, which the
  memory guard's margin covers. *group*: each value is measured separately. *switch*: zero and non-zero are measured
  separately. *step*: through the samples of a micro-batch and the gradients that are kept.
- **Read back**: whether the first optimiser step of every run shows that the knob was honoured
  (`trainables/witness.py`); a knob that was not becomes a note, such as "knobs.sdpa_backend=efficient was asked; the
  first step showed attention by math".
- **Own loop**: the call of `run` that applies it in [a loop of your own](own_loop.md). *any loop*: it is set around a
  training, whoever's loop that is in, also [a framework's](frameworks.md). A dash: your own lines, where they read it
  by `run["name"]`.

What single knobs bought on a CPU: [workloads](../benchmarks/results/workloads_cpu_202611.md). What they buy on yours:
`python -m tuning ablate RUN`.

"""
_TABLE = """\
| knob | what it does | kind | values | needs | try another value where | memory | read back | own loop |
|---|---|---|---|---|---|---|---|---|
"""
_OWN = """
## Knobs of our workloads

Only the workloads named with a knob have it, as yours has those that its file declares:

```
from trainables import Knob

class Mine:
    knobs = {
        "channels": Knob(32, "both", values=(16, 32, 64), shapes_model=True),
        "smoothing": Knob(0.1, "learning", low=0.0, high=0.3, shapes_model=True),
        "mirror": Knob(False, "learning"),
    }
```

First the default, then the kind, then what it may be; `shapes_model=True` where `model()` reads it, as
`config.knobs.channels`. It is searched where `default_space` or the command line says so, as in
`knobs.channels=[16,32]`, and stands in best.yaml like the others. What a workload does not declare is no knob of it
([the page of the contract](workload.md#knobs-of-your-own)).

"""
_WHERE: Mapping[str | None, str] = {
    "loader": "samples are waited for",
    "augment": "augmenting takes time",
    "transfer": "copies to the device take time",
    "launch": "kernels are many and small",
    "compute": "forward and backward take the time",
    "optimizer": "the optimiser's step takes time",
    "memory": "memory is short",
}
"""By `Span` and `Bound`: where a knob can help, in words."""


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
    own = [row.requires.words] if row.requires else []
    for rule in row.rules:
        whole = set(rule.values) >= {v for v in row.domain.values if v != row.default}
        own.append(rule.needs if whole else f"{rule.needs} for {' and '.join(map(word, rule.values))}")
    yield "; ".join(own) or "-"
    yield "; ".join(_WHERE[part] for part in dict.fromkeys((row.span, *row.remedies)) if part in _WHERE) or "-"
    yield str(row.memory)
    yield "no" if row.seen is None else "yes"
    call = "any loop" if row.asked_by == "around" else CALLS[row.asked_by]
    yield (
        " and ".join(f"`{one.partition('(')[0]}`" if one.startswith("run.") else one for one in call.split(" and "))
        or "-"
    )


if __name__ == "__main__":
    print(page(), end="")
