"""Draws: a hash of key, stream and position, and nothing else."""

from __future__ import annotations

import torch

from trainables import draws

KEYS = draws.keys(3, 1, torch.arange(4000))


def test_a_sample_draws_the_same_in_any_batch_and_padding() -> None:
    together = draws.normal(KEYS, (7, 3), stream=2)
    alone = torch.cat([draws.normal(key[None], (7, 3), stream=2) for key in KEYS[:20]])
    assert torch.equal(together[:20], alone)
    assert torch.equal(draws.normal(KEYS, (5, 3), stream=2), together[:, :5])


def test_keys_differ_between_samples_epochs_and_seeds() -> None:
    keys = {int(k) for s in range(8) for e in range(8) for k in draws.keys(s, e, torch.arange(200))}
    assert len(keys) == 8 * 8 * 200


def test_a_cpu_draws_what_other_devices_do() -> None:
    class Elsewhere(torch.Tensor):
        """A tensor that numpy may not be asked for."""

    elsewhere = KEYS[:50].as_subclass(Elsewhere)
    for shape in ((1,), (3, 7), (64,)):
        for stream in (0, 1, 2**20):
            for draw in (draws.uniform, draws.normal):
                there = draw(elsewhere, shape, stream)
                assert type(there) is Elsewhere
                assert torch.equal(draw(KEYS[:50], shape, stream), there.as_subclass(torch.Tensor))


def test_moments_and_independence() -> None:
    even, bell = draws.uniform(KEYS, (10,), stream=0), draws.normal(KEYS, (10,), stream=1)
    assert even.min() >= 0
    assert even.max() < 1
    # 40,000 numbers: the standard error of a mean is 0.005 of a standard deviation, that of a correlation 0.005.
    assert abs(even.mean() - 0.5) < 0.006
    assert abs(even.var() - 1 / 12) < 0.002
    assert abs(bell.mean()) < 0.02
    assert abs(bell.std() - 1) < 0.02
    assert abs((bell**4).mean() - 3) < 0.25
    pairs = [
        (even, draws.uniform(KEYS, (10,), stream=1)),  # streams
        (even[1:], even[:-1]),  # neighbouring samples
        (even[:, 1:], even[:, :-1]),  # neighbouring positions
        (even, bell),
    ]
    for one, other in pairs:
        correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation) < 0.025


def test_any_sample_of_an_epoch_gives_the_keys_of_the_others() -> None:
    others = torch.tensor([0, 5, 3999, -1])
    wanted = draws.keys(3, 1, others)
    for index in (0, 7, 1234):
        assert torch.equal(draws.beside(KEYS[index : index + 1], torch.tensor([index]), others), wanted)
