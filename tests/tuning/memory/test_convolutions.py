"""Workspaces of convolutions: closed forms, and what must hold for every shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuning.memory.convolutions import GROUPED, TRANSFORMED, ConvolutionKernel, workspaces_of
from tuning.memory.trace import EMPTIED, MAY_BE_LESS

PLAIN = ConvolutionKernel("forward", (8, 16, 32, 32), (8, 64, 32, 32), (64, 16, 3, 3), (1, 1))
IMAGE, RESULT, WEIGHT = (4 * n for n in (8 * 16 * 1024, 8 * 64 * 1024, 64 * 16 * 9))


@pytest.mark.parametrize(
    ("more", "taken", "timed"),
    [
        ({}, IMAGE + WEIGHT, TRANSFORMED * (IMAGE + RESULT)),
        ({"operation": "input"}, IMAGE + RESULT + WEIGHT, TRANSFORMED * (IMAGE + RESULT)),
        ({"stride": (2, 2)}, IMAGE + WEIGHT, IMAGE + RESULT),
        ({"weight": (64, 16, 1, 1)}, 0, IMAGE + RESULT),
        ({"groups": 4, "weight": (64, 4, 3, 3)}, 0, IMAGE + RESULT),
        ({"groups": 4, "weight": (64, 4, 3, 3), "operation": "weight"}, *[GROUPED * (IMAGE + RESULT)] * 2),
        ({"groups": 16, "weight": (64, 1, 3, 3)}, 0, 0),  # torch's own kernel
        ({"element_bytes": 2}, (IMAGE + WEIGHT) / 2, TRANSFORMED * (IMAGE + RESULT) / 2),
    ],
)
def test_what_a_kernel_takes_follows_from_its_copies(more: dict[str, Any], taken: int, timed: int) -> None:
    one = replace(PLAIN, **more)
    assert (one.workspace_bytes(), one.timed_bytes()) == (taken, timed)


@given(st.integers(1, 200), st.sampled_from(["forward", "input", "weight"]), st.sampled_from([1, 2, 16]))
def test_every_sample_adds_the_same_bytes(samples: int, operation: Any, groups: int) -> None:
    def at(n: int) -> tuple[int, int]:
        weight = (64, 16 // groups, 3, 3)
        one = ConvolutionKernel(operation, (n, 16, 9, 9), (n, 64, 9, 9), weight, (1, 1), groups)
        return one.workspace_bytes(), one.timed_bytes()

    few, some, many = at(samples), at(samples + 1), at(samples + 2)
    for low, middle, high in zip(few, some, many, strict=True):  # else two traces would not give every other size
        assert high - middle == middle - low >= 0


def test_a_shape_is_timed_once_and_what_is_cached_is_given_back_then() -> None:
    timed: set[ConvolutionKernel] = set()
    once = [MAY_BE_LESS, PLAIN.timed_bytes(), EMPTIED, PLAIN.workspace_bytes()]
    assert list(workspaces_of(PLAIN, timed)) == once
    assert list(workspaces_of(PLAIN, timed)) == once[-1:] == list(workspaces_of(PLAIN, None))
