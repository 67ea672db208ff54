"""Tours as ranks, (batch, nodes): the place of a node in its tour, from 0, and -1 for padding."""

from __future__ import annotations

import torch
from torch import Tensor

SHORTER = 1e-9  # by which an exchange of edges must shorten a tour of length 1 or so: rounding changes 1e-15


def tour_lengths(distances: Tensor, rank: Tensor) -> Tensor:
    """Returns the lengths of closed tours given as ranks, float64, (batch,)."""
    return (distances.double() * _edges(rank)).sum(dim=(1, 2))


def next_along(teacher: Tensor, rank: Tensor, steps: Tensor) -> Tensor:
    """Returns the node to go to at some steps, (batch, steps): of those not visited the nearest along `teacher`.

    Nearest is either way from the current node of the tour `rank`; of `teacher` itself that is its next node. Both
    tours are (batch, nodes), `steps` (steps,). At a step at which every node is visited the result is 0.
    """
    rank, s = rank[:, None], steps[None, :, None]
    count = (teacher >= 0).sum(dim=1)[:, None, None]
    here = teacher.gather(1, (rank == s - 1).byte().argmax(dim=2))[..., None]
    ahead = (teacher[:, None] - here).remainder(count)
    return torch.minimum(2 * ahead, 2 * (count - ahead) + 1).masked_fill(rank < s, 4 * teacher.shape[1]).argmin(dim=2)


def two_opt(distances: Tensor, rank: Tensor) -> Tensor:
    """Returns tours that no exchange of two edges shortens, from tours `rank` (Croes 1958); the best exchange first.

    Edges from u and from v, which comes later, are replaced by (u, v) and one between the nodes after them; the part
    of the tour between them is then gone through in the other direction. Distances are symmetric.
    """
    distances, nodes = distances.double(), rank.shape[1]
    while True:
        edges = _edges(rank).double()
        out = (distances * edges).sum(dim=2)
        change = distances + edges @ distances @ edges.transpose(1, 2) - out[:, :, None] - out[:, None]
        is_pair = (rank[:, :, None] >= 0) & (rank[:, :, None] < rank[:, None])
        best, pair = change.masked_fill(~is_pair, 0.0).flatten(1).min(dim=1, keepdim=True)
        if (best >= -SHORTER).all():
            return rank
        after, until = rank.gather(1, pair // nodes) + 1, rank.gather(1, pair % nodes)
        is_turned = (best < -SHORTER) & (rank >= after) & (rank <= until)
        rank = torch.where(is_turned, after + until - rank, rank)


def _edges(rank: Tensor) -> Tensor:
    """Returns which nodes follow each other, (batch, from, to)."""
    count = (rank >= 0).sum(dim=1, keepdim=True)
    return (rank[:, None] == ((rank + 1) % count)[:, :, None]) & (rank >= 0)[:, :, None]
