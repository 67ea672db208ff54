"""The signals workload: nothing depends on padding, on the place in a batch, or on where a batch is cut."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from tests.fakes import heard, knobs_of
from trainables.data import npy_sequences
from trainables.loop import prepare, train
from trainables.plan import Plan
from trainables.resident import Resident
from trainables.workload import Config, phases
from trainables.workloads import signals
from trainables.workloads.signals import BiLSTM, HostLengths, Signals, contrast, disturbed

pytestmark = pytest.mark.workload

CHANNELS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """40 recordings of 1 to 12 steps to train on and 12 to validate; class b lies 3 higher, c swings."""
    root, rng = tmp_path_factory.mktemp("signals"), np.random.default_rng(0)

    def recording(split: str, index: int) -> tuple[str, str, str, npy_sequences.NDArray[np.floating]]:
        steps, label = 1 + index % 12, "abc"[index % 3]
        wave = 3.0 * (label == "b") + 3.0 * (label == "c") * np.cos(np.pi * np.arange(steps))
        return split, label, f"{index:02d}", rng.normal(size=(steps, CHANNELS)) + wave[:, None] + 5.0

    npy_sequences.write(root, (recording(split, i) for split, n in (("train", 40), ("val", 12)) for i in range(n)))
    return root


@pytest.fixture(scope="module")
def config(folder):
    """A small model on the folder's recordings, half of the run for the encoder."""
    knobs = knobs_of(hidden_size=8, dropout=0.0, encoder_frac=0.5, batch_size=16, micro_batch_size=4)
    return Config(knobs.with_(learning_rate=1e-2), {"data": str(folder)})


def batch_of(config: Config, *indices: int) -> signals.SignalBatch:
    data = Signals().dataset(config, "train")
    return Signals.collate([data[i] for i in indices])


def codes(model: nn.Module, batch: signals.SignalBatch) -> Tensor:
    with torch.no_grad():
        return model.eval()(batch["x"], batch["mask"], batch["lengths"], embed=True)


def test_training_channels_have_mean_0_and_deviation_1(config):
    data = Signals().dataset(config, "train")
    together = torch.cat([data[i].x for i in range(len(data))])
    torch.testing.assert_close(together.mean(dim=0), torch.zeros(CHANNELS), atol=1e-5, rtol=0)
    torch.testing.assert_close(together.std(dim=0, correction=0), torch.ones(CHANNELS), atol=1e-5, rtol=0)
    val = Signals().dataset(config, "val")
    assert [val.classes, len(val), val[3].label] == [["a", "b", "c"], 12, 0]
    torch.testing.assert_close(val.mean, data.mean)


@pytest.mark.parametrize("packed", [False, True])
def test_a_sequence_gets_alone_what_it_gets_in_a_padded_batch(config, packed):
    model = Signals().model(config.with_knobs(sequence_packing=packed))
    together = codes(model, batch_of(config, *range(12)))  # of 1 to 12 steps
    alone = torch.cat([codes(model, batch_of(config, i)) for i in range(12)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-6)
    turned = codes(model, batch_of(config, *reversed(range(12))))
    torch.testing.assert_close(turned.flip(0), together, rtol=1e-4, atol=1e-6)


def test_packed_and_padded_give_the_same_numbers_and_gradients(config):
    found = []
    for packed in (False, True):
        torch.manual_seed(0)
        model = Signals().model(config.with_knobs(sequence_packing=packed))
        Signals().loss(model, batch_of(config, *range(12))).backward()
        found.append([p.grad for p in model.parameters()])
    for padded, packed_ in zip(*found, strict=True):
        torch.testing.assert_close(padded, packed_, rtol=1e-4, atol=1e-6)


def test_the_lstm_is_torchs_bidirectional_one():
    torch.manual_seed(0)
    ours, theirs = BiLSTM(3, packed=False), nn.LSTM(3, 3, batch_first=True, bidirectional=True)
    for name, own in ours.ahead.named_parameters():
        getattr(theirs, name).data.copy_(own)
    for name, own in ours.back.named_parameters():
        getattr(theirs, f"{name}_reverse").data.copy_(own)
    x = torch.randn(2, 5, 3)
    _, (last, _) = theirs(x)
    found = ours(x, torch.ones(2, 5, dtype=torch.bool), HostLengths(torch.tensor([5, 5])))
    torch.testing.assert_close(found, torch.cat([last[0], last[1]], dim=1))


@pytest.mark.parametrize("packed", [False, True])
def test_the_lstm_computes_no_padding_if_packed(config, packed):
    model, seen = Signals().model(config.with_knobs(sequence_packing=packed)), []
    model.lstm.ahead.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    codes(model, batch_of(config, 0, 5, 2))  # 1, 4 and 7 steps
    assert isinstance(seen[0], PackedSequence) == packed
    assert (seen[0].data if packed else seen[0]).shape == ((12, 8) if packed else (3, 7, 8))


def keys_of(count: int) -> Tensor:
    return torch.arange(1, count + 1) * 7919


def test_a_disturbance_is_the_same_in_place_and_if_padded():
    x, mask = torch.randn(8, 9, CHANNELS), torch.arange(9) < torch.arange(1, 9)[:, None]
    x *= mask.unsqueeze(2)
    before = x.clone()
    apart = disturbed(x, mask, keys_of(8), 1.0, in_place=False)
    assert torch.equal(x, before)
    assert not apart[~mask].any()
    longer = disturbed(nn.functional.pad(x, (0, 0, 0, 5)), nn.functional.pad(mask, (0, 5)), keys_of(8), 1.0, False)
    assert torch.equal(longer[:, :9], apart)
    assert torch.equal(disturbed(x, mask, keys_of(8), 1.0, in_place=True), apart)
    assert torch.equal(x, apart)


def test_strength_scales_the_disturbance_and_0_is_none():
    x, mask = torch.full((200, 20, 10), 100.0), torch.ones(200, 20, dtype=torch.bool)
    assert disturbed(x, mask, keys_of(200), 0.0, in_place=False) is x
    for strength in (0.5, 1.0, 2.0):
        out = disturbed(x, mask, keys_of(200), strength, in_place=False)
        kept = out[out != 0] - 100.0
        assert kept.std().item() == pytest.approx(signals.NOISE * strength, rel=0.02)
        channels = (out == 0).all(dim=1).float().mean().item()
        assert channels == pytest.approx(signals.CHANNEL_FRAC * strength, abs=0.02)
        spans = (out == 0).all(dim=2).float().mean().item()  # of a mean of half the longest each, some of them the same
        assert 0.7 < spans / (signals.SPANS * signals.SPAN_FRAC * strength / 2) <= 1.1


def test_views_and_references_do_not_depend_on_the_cut(config):
    workload, keys = Signals(), signals.draws.keys(0, 3, torch.arange(6))
    whole = workload.augment(batch_of(config, *range(6)), keys, config, "encoder")
    count = len(whole["others"])
    assert "labels" not in whole
    assert len(whole["x"]) == 2 * 6 + count
    for start in (0, 2, 4):
        part = workload.augment(batch_of(config, start, start + 1), keys[start : start + 2], config, "encoder")
        assert torch.equal(part["others"], whole["others"])
        longest = part["x"].shape[1]
        rows = [start, start + 1, 6 + start, 7 + start, *range(12, 12 + count)]
        assert torch.equal(part["x"], whole["x"][rows][:, :longest])
        assert part["lengths"].steps.tolist() == part["mask"].sum(dim=1).tolist()
    assert not torch.equal(whole["x"][:6], whole["x"][6:12])


def test_another_epoch_brings_other_references(config):
    workload, seen = Signals(), []
    for epoch in range(6):
        keys = signals.draws.keys(0, epoch, torch.tensor([5]))
        seen.append(tuple(workload.augment(batch_of(config, 5), keys, config, "encoder")["others"].tolist()))
    assert len(set(seen)) > 3
    assert all(len(set(others)) == len(others) for others in seen)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_classifiers_batch_keeps_its_labels(config, in_place):
    asked, batch = config.with_knobs(inplace_augmentation=in_place), batch_of(config, 0, 1, 2)
    before = batch["x"].clone()
    out = Signals().augment(batch, keys_of(3), asked, "classifier")
    assert torch.equal(out["labels"], batch["labels"])
    assert torch.equal(batch["x"], before) != in_place
    assert not torch.equal(out["x"], before)
    none = Signals().augment(batch_of(config, 0, 1, 2), keys_of(3), asked.with_knobs(augmentation=0.0), "classifier")
    assert torch.equal(none["x"], before)


def test_contrast_is_the_formula():
    unit = torch.eye(5)
    first, second, others = unit[:2], torch.stack([unit[0], unit[2]]), unit[3:5]
    found = contrast(torch.cat([3.0 * first, second, others]), torch.tensor([7, 8]), torch.tensor([1, 2]))
    own = math.exp(1.0 / signals.TEMPERATURE)  # the first sample's views are equal, the second's at right angles
    wanted = (2 * -math.log(own / (own + 2)) + 2 * math.log(3)) / 4
    assert found.item() == pytest.approx(wanted, rel=1e-6)
    left_out = contrast(torch.cat([first, second, others]), torch.tensor([7, 8]), torch.tensor([8, 2]))
    assert left_out.item() == pytest.approx((2 * -math.log(own / (own + 2)) + 2 * math.log(2)) / 4, rel=1e-6)


def run(config: Config, samples: int = 160, **knobs: Any) -> list[Tensor]:
    """Returns the weights after a run, over two epochs in each of the phases."""
    state = prepare(Resident(Signals()), config.with_knobs(**knobs), Plan(samples=samples))
    train(state)
    return [p.detach().clone() for p in state.model.parameters()]


def test_phases_share_the_run_and_the_head_waits_for_its_own(config):
    assert phases(Signals(), config) == {"encoder": 0.5, "classifier": 0.5}
    assert phases(Signals(), config.with_knobs(encoder_frac=0.0)) == {"classifier": 1.0}
    resident = Resident(Signals())
    first = {name: p.detach().clone() for name, p in resident.model(config).named_parameters()}
    state = prepare(resident, config, Plan(samples=160, window_s=0.0))
    heard(state, lambda _: state.samples >= 64)
    moved = {name for name, p in state.model.named_parameters() if not torch.equal(p, first[name])}
    assert moved == {name for name in first if not name.startswith("head.")}


def test_both_phases_learn(config):
    state = prepare(Resident(Signals()), config.with_knobs(micro_batch_size=16), Plan(samples=800, milestones=(800,)))
    (last,) = [event.values["accuracy"] for event in heard(state) if hasattr(event, "values")]
    assert last >= 10 / 12  # the recordings of one step of a and c look alike


@pytest.mark.parametrize(("amp_dtype", "packed"), [("bf16", False), ("fp16", True)])
def test_bfloat16_and_float16_run_both_phases(config, amp_dtype, packed):
    weights = run(config, samples=32, amp_dtype=amp_dtype, sequence_packing=packed)
    assert all(torch.isfinite(w).all() for w in weights)


def test_baselines_are_what_they_say(tmp_path):
    rows = [("train", "a", "1", 0.0), ("train", "a", "2", 2.0), ("train", "b", "3", 9.0)]
    rows += [("val", "a", "1", 4.0), ("val", "b", "2", 6.0), ("val", "b", "3", 7.0), ("val", "b", "4", 4.9)]
    npy_sequences.write(tmp_path, [(split, label, name, np.full((2, 1), value)) for split, label, name, value in rows])
    found = Signals().baselines(Config(knobs_of(), {"data": str(tmp_path)}))
    assert found == {"majority class": {"accuracy": 0.25}, "nearest class mean": {"accuracy": 0.75}}


def test_part_of_the_data_and_a_part_held_out(config, folder):
    few = Config(knobs_of(), {"data": str(folder), "val_frac": 0.25, "max_train_samples": 10})
    train_, val = (Signals().dataset(few, split) for split in ("train", "val"))  # type: ignore[arg-type]
    assert (len(train_), len(val)) == (10, 10)
    assert not {r.path for r in train_.recordings} & {r.path for r in val.recordings}
    one = Config(knobs_of(hidden_size=8, encoder_frac=0.5), {**few.options, "max_train_samples": 2})
    batch = Signals().augment(batch_of(one, 0, 1), keys_of(2), one, "encoder")
    assert len(batch["others"]) == 1  # two samples are one reference and its other choice
