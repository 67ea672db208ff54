"""A study of a loop of one's own, from the command line: every stage under a cap, its files, and more trials for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import ROOT, run
from tests.golden.outputs import journal, of, study

pytestmark = [pytest.mark.workload, pytest.mark.timeout(300)]
CARD = ["card=rtx4060", "card.memory_gib=0.0001", "card.reserve_gib=0"]  # a third of the space does not fit it
KNOBS = ["knobs.micro_batch_size=[16,64]", "knobs.batch_size=[16,64]", "knobs.num_workers=0"]


def test_a_custom_loop_under_a_cap_and_given_more_trials(tmp_path: Path) -> None:
    text = (ROOT / "tests" / "data" / "plain_loop.py").read_text()
    text = text.replace("moons(256, 2)", "moons(16, 2)")  # else evaluating needs most
    (tmp_path / "wide.py").write_text(text.replace("32)", "256)").replace("Linear(32", "Linear(256"))
    records = study(tmp_path, "concurrency=1", "search.trials=5", *CARD, *KNOBS, workload="wide.py")
    assert not of(records, "footprint")
    assert {"probe", "trial", "confirmed", "window", "pick"} <= {r["event"] for r in records}
    assert {t["config"]["momentum"] for t in of(records, "trial")} <= {0.0, 0.9}
    assert "is not predicted" in " ".join(r["text"] for r in of(records, "note"))
    failed = [r for r in of(records, "probe") if r["outcome"] == "oom"] + of(records, "oom") + of(records, "refused")
    assert min(r["config"]["micro_batch_size"] for r in failed) >= 32
    assert all(t["config"]["micro_batch_size"] <= 32 for t in of(records, "trial") if t["outcome"] == "ok")
    assert {t["outcome"] for t in of(records, "trial")} <= {"ok", "stopped", "refused"}, "no trial is lost"
    cap = of(records, "study")[0]["card"]["cap_bytes"]
    assert max(r["peak_allocated_bytes"] for r in of(records, "confirmed")) <= cap

    made = tmp_path / "runs" / "wide" / "one"
    best = (made / "best.yaml").read_text()
    assert "momentum:" in best
    assert "weight_decay" not in best, "it is nothing that their loop asks for"

    more = ["resume=one", "search.trials=6", "pick.tolerance=1"]
    assert run("tuning.run", more, tmp_path) == 0, (tmp_path / "err").read_text()[-2000:]
    again = journal(made)
    first, ended = ({r["trial"]: r["values"] for r in of(own, "trial")} for own in (records, again))
    assert len(of(again, "trial")) == len(ended), "none ran twice"
    assert {t: ended[t] for t in first} == first
    assert len(of(again, "pick")) == 2
    assert not of(again[len(records) :], "probe"), "what was probed is known"
    assert again[-1]["event"] == "stop"
    rounds = [(r["round"], r["name"]) for r in of(again[len(records) :], "window")]
    assert len(rounds) == len(set(rounds))
    last = of(again, "pick")[-1]
    assert last["tolerance"] == 1.0
    assert ", less 1 (" in last["rule"] or last["kind"] != "faster", "windows of 10 ms may find today's as fast"
