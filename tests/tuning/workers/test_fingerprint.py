"""Whether two runs have the same data is told from samples that are the same each time they are read."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from tuning.workers.fingerprint import of_data


class Noisy(Dataset[torch.Tensor]):
    """Forty vectors of three numbers, with noise and a random length where they are asked for."""

    def __init__(self, *, noise: bool = False, lengths: bool = False, start: float = 0.0) -> None:
        self._noise, self._lengths, self._start = noise, lengths, start

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> torch.Tensor:
        length = int(torch.randint(1, 100, ())) if self._lengths else 3
        return torch.full((length,), self._start + number) + (torch.randn(length) if self._noise else 0.0)


def test_equal_data_have_equal_hashes_and_others_have_others() -> None:
    assert of_data([Noisy()]) == of_data([Noisy()])
    assert of_data([Noisy()]) != of_data([Noisy(start=1.0)])


def test_samples_with_noise_are_not_taken_for_other_data() -> None:
    assert of_data([Noisy(noise=True)]) == ""


def test_samples_of_random_lengths_tell_nothing() -> None:
    assert of_data([Noisy(lengths=True)]) == ""
