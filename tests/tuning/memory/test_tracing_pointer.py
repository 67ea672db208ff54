"""The LSTM pointer network, traced: on the kernels of a card, and against the CPU's peak."""

import pytest

from trainables import loop
from trainables.knobs import Knobs, Scalar
from trainables.our_knobs import OURS
from trainables.resident import Resident
from trainables.workload import Config
from trainables.workloads.pointer import WORKLOAD
from tuning.memory.peaks import highest
from tuning.memory.predictor import Request, predict_all
from tuning.memory.tracing.step import Job, predict

OPTIONS = {**WORKLOAD.options, "train_samples": 40, "val_samples": 8}
KNOBS: dict[str, Scalar] = {"network": "lstm", "hidden_size": 32, "dropout": 0.2}
pytestmark = [pytest.mark.workload, pytest.mark.timeout(300)]


@pytest.mark.parametrize("options", [{}, {"teacher_forcing": 0.5, "bidirectional": False}])
def test_the_lstms_peak_is_what_a_virtual_card_counts(options: dict[str, Scalar]) -> None:
    config = Config(Knobs.of(KNOBS, OURS["pointer"]), {**OPTIONS, **options})
    (trace,) = predict(Job(WORKLOAD, config), (32,)).traces
    several, _ = loop.peaks(Resident(WORKLOAD), config.with_knobs(micro_batch_size=32), 32)
    assert highest(trace.events)[1] == pytest.approx(several, rel=0.003)


def test_the_lstm_is_traced_with_a_cards_kernels() -> None:
    asked = [{**KNOBS, "activation_checkpointing": is_on, "amp_dtype": "fp16"} for is_on in (False, True)]
    requests = [Request("pointer", OPTIONS, knobs, "cuda") for knobs in asked]
    plain, checkpointed = predict_all(requests, OURS["pointer"], timeout_s=240.0, cache=None)
    assert plain.confidence == "workspaces unseen", plain.notes
    assert checkpointed.peak(64).live_bytes < plain.peak(64).live_bytes
