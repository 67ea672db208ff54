"""What every workload must hold to, ours and a user's: pytest THIS_FILE --workload=path/to/mine.py

Covered: what the four methods return, same seed same weights, same data at every call, that the loss falls, that
evaluation does not depend on the batch size, and that samples reach loader workers.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from tests.fakes import heard
from trainables import kinds
from trainables.batches import batch_of, mapped, size_of, tensors_of
from trainables.knobs import Knobs, ReadKnobs
from trainables.loop import Evaluation, evaluate, prepare, train
from trainables.plan import Plan
from trainables.resident import Resident
from trainables.stopwatch import Window
from trainables.validation import validation_loader
from trainables.workload import BUILT_IN, Config, Workload, baselines, blocks, collate_of, parameter_groups, table_of
from trainables.workload_files import load
from tuning.config.yaml_files import of_groups

SMALL: dict[str, dict[str, Any]] = {
    "nli": {"max_train_samples": 32, "max_val_samples": 16, "layers": 1, "max_length": 16},
    "pointer": {"nodes": 5, "train_samples": 64, "val_samples": 16, "layers": 1},
    "headpose": {"heads": 40, "image_size": 32},
    "temporal": {"val_frac": 0.005},
    "signals": {"max_train_samples": 32, "max_val_samples": 16},
}
"""Our own workloads are tested on a small part of their data; a user's on what its options say."""


@pytest.fixture(scope="module")
def resident(workload_ref):
    return Resident(load(workload_ref))


@pytest.fixture(scope="module")
def config(resident, workload_ref):
    options = {**dict(getattr(resident.workload, "options", {})), **SMALL.get(workload_ref, {})}
    rate = typical_rate(space_of(workload_ref, resident.workload).get("learning_rate", 1e-3))
    rows = table_of(resident.workload)
    steady = {"dropout": 0.0} if "dropout" in rows else {}
    knobs = Knobs.of({"batch_size": 8, "micro_batch_size": 4, "learning_rate": rate, **steady}, rows)
    return Config(knobs, options)


def space_of(ref: str, workload: Any) -> Mapping[str, Any]:
    """Returns what is searched: a workload of ours has it in its file of `search_spaces`."""
    if ref not in BUILT_IN:
        return cast(Mapping[str, Any], workload.default_space)
    return cast(Mapping[str, Any], dict(of_groups({"workload": ref}))[f"search_spaces/workload/{ref}.yaml"]["knobs"])


def typical_rate(searched: Any) -> float:
    """Returns the middle of what the workload searches: what lowers one loss does nothing to another."""
    if isinstance(searched, dict):
        return float(math.sqrt(searched["low"] * searched["high"]))
    return float(searched[len(searched) // 2]) if isinstance(searched, list) else float(searched)


def first_batch(resident: Resident, config: Config, count: int = 4) -> Any:
    dataset = resident.dataset(config, "train")
    return collate_of(resident.workload)([dataset[i] for i in range(count)])


def test_it_keeps_the_protocol(resident):
    assert isinstance(resident.workload, Workload)
    assert set(resident.workload.objectives.values()) <= {"min", "max"}


def test_splits_have_samples_and_are_the_same_at_every_call(resident, config):
    for split in ("train", "val"):
        one, two = (resident.workload.dataset(config, split) for _ in range(2))
        assert size_of(one) == size_of(two) > 0
        assert repr(one[0]) == repr(two[0])


def test_the_loss_is_one_finite_number_with_gradients(resident, config):
    loss = resident.workload.loss(resident.model(config), first_batch(resident, config))
    assert loss.shape == ()
    assert math.isfinite(loss.item())
    assert loss.requires_grad


def test_the_loss_is_a_mean_over_the_batch(resident, config):
    model = resident.model(config).eval()
    with torch.no_grad():
        dataset, collate = resident.dataset(config, "train"), collate_of(resident.workload)
        whole = resident.workload.loss(model, first_batch(resident, config, 4))
        each = [resident.workload.loss(model, collate([dataset[i]])).item() for i in range(4)]
    assert whole.item() == pytest.approx(sum(each) / 4, rel=1e-3, abs=1e-4)


def test_same_seed_same_weights(resident, config):
    made = []
    for _ in range(2):
        torch.manual_seed(7)
        made.append(resident.workload.model(config).state_dict())
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


def test_each_own_knob_says_whether_the_model_reads_it(resident, config, workload_ref):
    read: set[str] = set()
    resident.workload.model(replace(config, knobs=ReadKnobs(config.knobs, read)))
    own = table_of(resident.workload).own
    shaping = {name for name, row in own.items() if row.shapes_model}
    assert read & own.keys() <= shaping, "give its row shapes_model=True"
    assert workload_ref not in BUILT_IN or shaping <= read, "a row says that model reads it"


def test_every_optimised_parameter_is_trainable_and_in_one_group(resident, config):
    model = resident.model(config)
    grouped = [id(p) for group in parameter_groups(resident.workload, model, config) for p in group["params"]]
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == trainable


def test_training_lowers_the_loss(resident, config):
    state = prepare(resident, config.with_knobs(micro_batch_size=8), Plan(samples=160, window_s=0.0))
    losses = [event.loss for event in heard(state) if isinstance(event, Window)]
    assert sum(losses[-4:]) / 4 < sum(losses[:4]) / 4


def test_evaluation_is_the_same_whatever_the_batch_size(resident, config):
    """A mean over batches needs weights: the last of the larger ones has one sample, where the split is small."""
    found = []
    for size in (1, min(64, size_of(resident.dataset(config, "val")) - 1)):
        state = prepare(resident, config.with_knobs(batch_size=size, micro_batch_size=size), Plan(samples=8))
        found.append(evaluate(state, state.model))
    assert all(isinstance(e, Evaluation) for e in found)
    for name in resident.workload.objectives:
        assert found[0].values[name] == pytest.approx(found[1].values[name], rel=1e-2, abs=1e-3)


def test_loader_workers_deliver_the_same_batches(resident, config):
    plain = prepare(resident, config, Plan(samples=16))
    train(plain)
    weights = [p.detach().clone() for p in plain.model.parameters() if p.requires_grad]
    worked = prepare(resident, config.with_knobs(num_workers=1), Plan(samples=16))
    train(worked)
    after = [p for p in worked.model.parameters() if p.requires_grad]
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(weights, after, strict=True))


@pytest.mark.parametrize("ram_cache", [False, True])
def test_a_batch_made_at_once_is_the_one_collated(resident, config, ram_cache):
    plain = resident.dataset(config.with_knobs(ram_cache=False), "train")
    found = resident.dataset(config.with_knobs(ram_cache=ram_cache), "train")
    indices = (5, 0, size_of(plain) - 1, 5)
    collate = collate_of(resident.workload)
    wanted = collate([plain[i] for i in indices])
    for batch in (batch_of(found, collate, indices), collate([found[i] for i in indices])):
        assert described(batch) == described(wanted)
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(batch), tensors_of(wanted), strict=True))


def described(batch: Any) -> str:
    """Returns a batch with its tensors by shape and type, and all else as it is written."""
    return repr(mapped(lambda t: t.new_empty(0, *t.shape), batch))


def test_system_knobs_leave_what_is_learned_alone(resident, config, workload_ref):
    """A study measures the same before it trusts them: what fails here is searched there as a knob of both kinds."""
    changes = {"micro_batch_size": 4, "length_bucketing": True, "activation_checkpointing": True, "ram_cache": True}
    found = kinds.differing(resident, config, {**changes, "channels_last": True})
    if found and workload_ref not in BUILT_IN:
        pytest.xfail("; ".join(f"{knob} changes what is learned: {why}" for knob, why in found.items()))
    assert not found


def test_validation_covers_every_sample(resident, config):
    dataset = resident.dataset(config, "val")
    count = size_of(dataset)
    given = validation_loader(list(range(count)), list, 5, resident.lengths(config, "val"), config)  # type: ignore[arg-type]
    assert sorted(index for batch in given for index in batch) == list(range(count))


def test_evaluation_needs_no_more_memory_than_training(resident, config):
    """Else a run that training would have had room for ends when it is judged."""
    state = prepare(resident, config, Plan(samples=8, milestones=(8,), cap_bytes=1 << 62))
    peaks: list[int] = []
    *_, evaluation = heard(state, lambda _: peaks.append(state.peak_allocated_bytes))
    assert not isinstance(evaluation, Window)
    assert peaks[-1] == max(peaks[:-1])


def test_baselines_speak_of_the_objectives(resident, config):
    for name, values in baselines(resident.workload, config).items():
        assert set(values) <= set(resident.workload.objectives), name


def test_a_built_in_has_blocks_to_checkpoint(resident, config, workload_ref):
    if workload_ref in BUILT_IN:
        assert len(blocks(resident.workload, resident.model(config))) > 0
