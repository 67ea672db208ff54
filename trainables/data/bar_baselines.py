"""Accuracies on labels of market bars without a network: those of four plain rules, 0 to 1."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainables.data.bar_windows import BarWindows
from trainables.data.timeframes import DAY_US, HOUR_US, Ints


def rules(train: BarWindows, val: BarWindows, daily: bool) -> dict[str, float]:
    """Returns the accuracy of each rule on the validation part, by name.

    Whether the last known label is to be followed or opposed is learned. The clock is the UTC hour of the decision, of
    daily bars the weekday.
    """
    unit_us, units = (DAY_US, 7) if daily else (HOUR_US, 24)
    clocks = [part.decided_us // unit_us % units for part in (train, val)]
    flat = [part.windows.reshape(len(part.labels), -1) for part in (train, val)]
    return {
        "majority class": float(max(val.labels.mean(), 1.0 - val.labels.mean())),
        "last known label": by_key(train.last_labels, train.labels, val.last_labels, val.labels),
        "weekday" if daily else "hour of day": by_key(clocks[0], train.labels, clocks[1], val.labels),
        "logistic regression": logistic(flat[0], train.labels, flat[1], val.labels),
    }


def by_key(train_key: Ints, train: Ints, val_key: Ints, val: Ints) -> float:
    """Returns the accuracy of the training majority among decisions with the same key, such as the hour of the day.

    Keys are whole numbers, one a decision; one that is not seen in training is given the majority of all.
    """
    overall = int(train.mean() > 0.5)
    table = {int(key): int(train[train_key == key].mean() > 0.5) for key in np.unique(train_key)}
    guesses = np.array([table.get(int(key), overall) for key in val_key])
    return float((guesses == val).mean())


def logistic(train_x: NDArray[np.float32], train: Ints, val_x: NDArray[np.float32], val: Ints) -> float:
    """Returns the accuracy of logistic regression on features of shape (decisions, feature), penalised by L2.

    Newton's method (iteratively reweighted least squares); the penalty is one pseudo-observation in a hundred.
    """
    x, x_val = (np.column_stack([np.ones(len(a)), a.astype(np.float64)]) for a in (train_x, val_x))
    penalty = np.full(x.shape[1], 0.01 * len(x))
    penalty[0] = 1e-6  # the constant is free
    weights = np.zeros(x.shape[1])
    for _ in range(8):
        chance = 1.0 / (1.0 + np.exp(-np.clip(x @ weights, -30.0, 30.0)))
        gradient = x.T @ (chance - train) + penalty * weights
        curvature = (x * (chance * (1.0 - chance))[:, None]).T @ x + np.diag(penalty)
        weights -= np.linalg.solve(curvature, gradient)
    return float(((x_val @ weights > 0.0) == val).mean())
