"""A run as Optuna's study: the same trials, each once, and importances that find what decides."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from tuning.config.errors import ConfigError
from tuning.journal.run import History
from tuning.search import optuna_study

ENDED = {"ok": TrialState.COMPLETE, "stopped": TrialState.PRUNED, "cut": TrialState.PRUNED}


def test_each_trial_that_ended_is_there_once(records: Any, tmp_path: Path) -> None:
    run = History(records)
    for part in (run.before(run.ended[3].seq), run, run):
        storage = optuna_study.opened(str(tmp_path / "optuna.log"))
        study = optuna_study.mirrored(part, "nli one", storage)
        assert len(study.trials) == len(part.ended)
    assert study.metric_names == ["accuracy", "samples_per_s"]
    by_id = {trial.user_attrs["trial"]: trial for trial in study.trials}
    for end in run.ended:
        trial = by_id[end.trial]
        assert trial.state == ENDED.get(end.outcome, TrialState.FAIL)
        assert trial.params.items() <= end.config.items()
        if trial.state == TrialState.COMPLETE:
            assert trial.values == [end.values["accuracy"], end.samples_per_s]
        assert trial.constraints["memory"] == (1.0 if "oom" in end.outcome else -1.0)


def test_a_storage_that_cannot_be_used_is_an_error(records: Any, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'theirs.db'}"
    optuna.create_study(storage=url, study_name="nli one")
    with pytest.raises(ConfigError, match="a study nli one of other objectives"):
        optuna_study.mirrored(History(records), "nli one", optuna_study.opened(url))
    with pytest.raises(ConfigError, match="cannot be opened"):
        optuna_study.opened("nodb://here")


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_importances_find_what_decides_each_objective() -> None:
    draw = random.Random(0)
    study = optuna.create_study(directions=["maximize", "maximize"])
    study.set_metric_names(["accuracy", "samples_per_s"])
    names = ("learning_rate", "batch_size", "dropout")
    for _ in range(200):
        rate, batch, dropout = (draw.random() for _ in names)
        params = dict(zip(names, (rate, batch, dropout), strict=True))
        values = [1.0 - (rate - 0.3) ** 2 - 0.1 * batch, 8.0 * batch + rate]
        space = dict.fromkeys(names, optuna.distributions.FloatDistribution(0.0, 1.0))
        study.add_trial(optuna.create_trial(values=values, params=params, distributions=space))
    found = optuna_study.importances(study)
    assert [*found["accuracy"]] == ["learning_rate", "batch_size", "dropout"]
    assert next(iter(found["samples_per_s"])) == "batch_size"
    assert found["samples_per_s"]["batch_size"] > 0.8
    assert all(sum(shares.values()) == pytest.approx(1.0) for shares in found.values())
