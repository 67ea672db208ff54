"""Travelling salesman by pointing: which node comes next? A pointer network taught by shortest tours.

Data: small instances drawn from 45,065 cities of the world (GeoNames, CC BY 3.0) with exact tours by fast-tsp;
`workload.data=uniform` draws points on a square instead (trainables/data/tours.py). docs/data.md reads files of TSPLIB.
Model: a pointer network (Vinyals et al., arXiv 1506.03134) whose encoder is a Transformer, as in Kool et al.
(1803.08475). At each step it encodes the nodes again, by 8 features such as `is_visited`. Attention decreases with
distance, at a different rate in each head, as ALiBi's does with position (Press et al., 2108.12409).
With teacher forcing the tour so far is known at every step, so all steps of a tour are trained in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from trainables import draws
from trainables.knob_columns import Domain, Knob, Options
from trainables.our_knobs import OURS
from trainables.workload import SPLIT_SEED, Config, Split, WorkloadError, options_of

try:
    from trainables.data import tours
    from trainables.data.tours import MOST_EXACT, Instance, Splits, scaled
except ImportError as error:
    raise WorkloadError(f"workload pointer needs: pip install 'cardtune[pointer]' ({error})") from None

HEADS = 4
SLOPES = (0.0, 2.0, 4.0, 6.0)
"""For each head: how much an attention score falls per unit of distance; the instance's square has side 1."""
IS_VISITED, IS_CURRENT, IS_START, TO_CURRENT = 2, 3, 4, 5
NODE_FEATURES = (
    *("x", "y", "is_visited", "is_current", "is_start"),
    *("distance_to_current", "distance_to_start", "step_frac"),
)

TourBatch = dict[str, Tensor]
"""points (batch, nodes, 2); distances (batch, nodes, nodes); rank (batch, nodes): a node's place in the shortest tour,
from 0, and -1 for padding."""
Scorer = Callable[[Tensor, Tensor], Tensor]
"""Features and distances in, a score for each node to come next out; see `Pointer.forward`."""


class TourSample(NamedTuple):
    """An instance: points (nodes, 2), distances (nodes, nodes), rank (nodes,)."""

    points: Tensor
    distances: Tensor
    rank: Tensor


class Instances(Dataset[TourSample]):
    """Instances, each scaled on access to a square of side 1 around 0."""

    def __init__(self, instances: Sequence[Instance]) -> None:
        self._instances = instances

    def __len__(self) -> int:
        return len(self._instances)

    def __getitem__(self, index: int) -> TourSample:
        points, distances, order = (torch.from_numpy(part) for part in scaled(self._instances[index]))
        return TourSample(points.float(), distances.float(), order.argsort())


class NodeBlock(nn.Module):
    """A Transformer layer (pre-norm) over the nodes of one step."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Returns new states, (rows, nodes, width), of states and an attention bias (rows, heads, nodes, nodes)."""
        rows, nodes, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(rows, nodes, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(rows, nodes, width)))
        return x + cast(Tensor, self.dropout(self.feed_forward(self.norm_2(x))))


class Pointer(nn.Module):
    """Scores the nodes that can come next in an incomplete tour."""

    slopes: Tensor

    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Linear(len(NODE_FEATURES), width)
        self.layers = nn.ModuleList(NodeBlock(width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        # Keys have no bias, here or above: softmax cancels it, and AdamW would turn its rounding errors into steps.
        self.query, self.key = nn.Linear(2 * width, width), nn.Linear(width, width, bias=False)
        self.nearness = nn.Parameter(torch.tensor(5.0))  # the initial value prefers near nodes
        self.register_buffer("slopes", torch.tensor(SLOPES), persistent=False)

    def forward(self, features: Tensor, distances: Tensor) -> Tensor:
        """Returns scores, (batch, steps, nodes), of features (batch, steps, nodes, 8) and distances.

        Distances are (batch, nodes, nodes). Visited nodes cannot be chosen, and nothing attends to them, except for the
        start and the current node: the remaining task is a shortest path between these two, whatever came before.
        """
        batch, steps, nodes, _ = features.shape
        visited, ends = features[..., IS_VISITED] > 0, features[..., IS_CURRENT : IS_START + 1]
        unseen = visited & (ends.sum(dim=-1) == 0)
        bias = (-self.slopes[:, None, None] * distances[:, None]).unsqueeze(1).expand(-1, steps, -1, -1, -1)
        bias = bias.masked_fill(unseen[:, :, None, None], float("-inf")).flatten(0, 1)
        x = self.embed(features.flatten(0, 1))
        for layer in self.layers:
            x = layer(x, bias)
        x = self.norm(x)
        current_and_start = (ends.flatten(0, 1).transpose(1, 2).to(x.dtype) @ x).flatten(1)
        scores = (self.key(x) @ self.query(current_and_start).unsqueeze(-1)).view(batch, steps, nodes)
        scores = scores.float() * x.shape[-1] ** -0.5 - self.nearness * features[..., TO_CURRENT]
        # Not -inf: in a batch with longer tours, a short tour has steps at which all nodes are visited.
        return cast(Tensor, scores.masked_fill(visited, -1e9))


def features(batch: TourBatch, rank: Tensor, steps: Tensor) -> Tensor:
    """Returns the network's inputs at some steps, (batch, steps, nodes, 8), named in `NODE_FEATURES`.

    `rank` (batch, nodes) is a node's place in the tour. At step s, one of `steps` (steps,), nodes of a rank below s are
    visited, and the current node has rank s - 1. Padding, of rank -1, counts as visited.
    """
    points, distances = batch["points"], batch["distances"]
    rank, s = rank[:, None], steps[None, :, None]
    shape = (len(points), len(steps), points.shape[1])
    current, start = rank == s - 1, (rank == 0).expand(shape)
    ways = [distances.gather(1, at.byte().argmax(dim=2, keepdim=True).expand(shape)) for at in (current, start)]
    share = s / (rank >= 0).sum(dim=2, keepdim=True)
    columns = [points[:, None, :, 0], points[:, None, :, 1], rank < s, current, start, *ways, share]
    return torch.stack([column.expand(shape).to(points.dtype) for column in columns], dim=-1)


@torch.no_grad()
def decode(model: Scorer, batch: TourBatch) -> Tensor:
    """Returns greedy tours, which always go to the node with the best score, as ranks, (batch, nodes)."""
    teacher = batch["rank"]
    count, nodes = (teacher >= 0).sum(dim=1, keepdim=True), teacher.shape[1]
    rank = teacher.masked_fill(teacher > 0, nodes)  # padding and the start stay
    steps = torch.arange(nodes, device=teacher.device)
    for number in range(1, nodes - 1):
        step = steps[number : number + 1]
        best = model(features(batch, rank, step), batch["distances"])[:, 0].argmax(dim=1, keepdim=True)
        rank = torch.where(number < count - 1, rank.scatter(1, best, number), rank)
    return torch.where(rank == nodes, count - 1, rank)  # the last node


def tour_lengths(distances: Tensor, rank: Tensor) -> Tensor:
    """Returns the lengths of closed tours given as ranks, float64, (batch,)."""
    count = (rank >= 0).sum(dim=1, keepdim=True)
    follows = rank[:, None] == ((rank + 1) % count)[:, :, None]  # (batch, from, to)
    return (distances.double() * (follows & (rank >= 0)[:, :, None])).sum(dim=(1, 2))


class PointerNet:
    """Tours, judged by their gap: the mean of length / shortest length, minus 1. The contract is in workload.py."""

    objectives: ClassVar[Mapping[str, Literal["min", "max"]]] = {"gap": "min"}
    knobs: ClassVar[Mapping[str, Knob]] = OURS["pointer"].own
    options: ClassVar[Options] = {
        "data": None,  # None: cities; "uniform": squares
        "nodes": 15,  # of an instance, 5 to 20
        "train_samples": 3000,
        "val_samples": 500,
        "layers": 2,
    }

    domains: ClassVar[Mapping[str, Domain]] = {
        "nodes": Domain(int, low=5, high=MOST_EXACT),
        "train_samples": Domain(int, low=1),
        "val_samples": Domain(int, low=1),
        "layers": Domain(int, low=1, high=100),
    }

    def __init__(self) -> None:
        self._splits: dict[tuple[Any, ...], Splits] = {}

    def dataset(self, config: Config, split: Split) -> Instances:
        """Returns the split, the same for every seed; drawn and solved once a process, 4 s by default."""
        options = options_of(self, config)
        key = tuple(options[name] for name in ("data", "nodes", "train_samples", "val_samples"))
        if key not in self._splits:
            sizes = options["train_samples"], options["val_samples"]
            self._splits[key] = tours.splits(options["data"], options["nodes"], sizes, SPLIT_SEED)
        return Instances(self._splits[key].train if split == "train" else self._splits[key].val)

    @staticmethod
    def collate(samples: Sequence[TourSample]) -> TourBatch:
        """Returns the batch, instances of fewer nodes padded to the largest."""
        most = max(len(s.rank) for s in samples)
        short = [most - len(s.rank) for s in samples]
        return {
            "points": torch.stack([F.pad(s.points, (0, 0, 0, n)) for s, n in zip(samples, short, strict=True)]),
            "distances": torch.stack([F.pad(s.distances, (0, n, 0, n)) for s, n in zip(samples, short, strict=True)]),
            "rank": torch.stack([F.pad(s.rank, (0, n), value=-1) for s, n in zip(samples, short, strict=True)]),
        }

    @staticmethod
    def length(sample: TourSample) -> int:
        """Returns the number of nodes."""
        return len(sample.rank)

    def augment(self, batch: TourBatch, keys: Tensor, config: Config, phase: str) -> TourBatch:
        """Returns the batch with some instances replaced by equivalent ones.

        A share of the instances, half of the knob, are mirrored, rotated by right angles, started at another node and
        traversed in the other direction; all combinations are equally likely.
        """
        inplace = config.knobs.inplace_augmentation
        points, rank = (batch[name] if inplace else batch[name].clone() for name in ("points", "rank"))
        padding = rank < 0
        count = (~padding).sum(dim=1, keepdim=True)
        some = draws.uniform(keys, (1,), stream=0) < config.knobs.augmentation / 2
        dice = draws.uniform(keys, (5,), stream=1)
        coin = (dice < 0.5) & some
        points.mul_(1.0 - 2.0 * coin[:, None, :2])
        points.copy_(torch.where(coin[:, 2:3, None], points.flip(-1), points))
        rank.mul_(1 - 2 * coin[:, 3:4].long()).add_((dice[:, 4:] * count * some).long())
        rank.remainder_(count).masked_fill_(padding, -1)
        return {**batch, "points": points, "rank": rank}

    def model(self, config: Config) -> Pointer:
        """Returns a new network of `knobs.hidden_size`."""
        width = config.knobs.hidden_size
        if width % HEADS:
            raise WorkloadError(f"knobs.hidden_size={width}: expected a multiple of {HEADS}, the attention heads")
        return Pointer(width, options_of(self, config)["layers"], config.knobs.dropout)

    def loss(self, model: nn.Module, batch: TourBatch) -> Tensor:
        """Returns the cross-entropy of the next node: the mean over a tour's steps, then over the batch.

        The last node of a tour is not counted as a step, since there is no choice.
        """
        rank = batch["rank"]
        steps = torch.arange(1, rank.shape[1] - 1, device=rank.device)
        scores = model(features(batch, rank, steps), batch["distances"])
        targets = (rank[:, None] == steps[None, :, None]).byte().argmax(dim=2)
        loss = F.cross_entropy(scores.transpose(1, 2), targets, reduction="none")
        choices = (rank >= 0).sum(dim=1, keepdim=True) - 2
        return (loss * (steps <= choices) / choices).sum(dim=1).mean()

    def evaluate(self, model: nn.Module, batches: Iterable[TourBatch]) -> dict[str, float]:
        """Returns the gap of greedily decoded tours, 0 if all are shortest; waits for the device once."""
        ratios = [
            tour_lengths(b["distances"], decode(model, b)) / tour_lengths(b["distances"], b["rank"]) for b in batches
        ]
        return {"gap": torch.cat(ratios).mean().item() - 1.0}

    def baselines(self, config: Config) -> dict[str, dict[str, float]]:
        """Returns the gap of always going to the nearest node, and the expected gap of a random tour."""
        data = self.dataset(config, "val")
        batches = [self.collate([data[i]]) for i in range(len(data))]
        # All edges are equally likely, so the expected length of a random tour of n nodes is that of n mean edges.
        chance = [
            b["distances"].sum() / (b["rank"].numel() - 1) / tour_lengths(b["distances"], b["rank"]) for b in batches
        ]
        nearest = self.evaluate(cast(nn.Module, _nearest_first), batches)
        return {"nearest neighbour": nearest, "random tour": {"gap": torch.cat(chance).mean().item() - 1.0}}


def _nearest_first(features: Tensor, distances: Tensor) -> Tensor:
    """Returns scores that prefer the nearest node; in the place of a network."""
    return (-features[..., TO_CURRENT]).masked_fill(features[..., IS_VISITED] > 0, -1e9)


WORKLOAD = PointerNet()
