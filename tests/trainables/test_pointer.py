"""The pointer network: what it may see and point at, that decoding is what it says, and that equal tours stay equal."""

import itertools
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.fakes import knobs_of
from trainables import draws
from trainables.data.tours import euclidean, solved
from trainables.workload import Config, Split, WorkloadError
from trainables.workloads.pointer import Instances, Pointer, PointerNet, TourBatch, decode, features, tour_lengths

pytestmark = pytest.mark.workload


def instances(*sizes: int, seed: int = 0) -> Instances:
    """Returns solved instances of so many nodes each, their points uniform."""
    generator = np.random.default_rng(seed)
    points = [generator.random((n, 2)) for n in sizes]
    return Instances([solved(p, euclidean(p)) for p in points])


def batch_of(*sizes: int, seed: int = 0) -> TourBatch:
    data = instances(*sizes, seed=seed)
    return PointerNet.collate([data[i] for i in range(len(data))])


def network(seed: int = 0) -> Pointer:
    """Returns a small network in eval mode; its taste for the nearest node is off, so that tours differ from it."""
    torch.manual_seed(seed)
    model = Pointer(width=16, layers=2, dropout=0.0).eval()
    nn.init.zeros_(model.nearness)
    return model


def scores(model: nn.Module, batch: TourBatch, rank: Tensor, steps: list[int]) -> Tensor:
    with torch.no_grad():
        return cast(Tensor, model(features(batch, rank, torch.tensor(steps)), batch["distances"]))


def order_of(rank: Tensor) -> list[list[int]]:
    """Returns each tour as its nodes in order, padding left out."""
    return [[int(i) for i in row.argsort() if row[i] >= 0] for row in rank]


def length_of(distances: Tensor, order: list[int]) -> float:
    return sum(float(distances[a, b]) for a, b in zip(order, order[1:] + order[:1], strict=True))


def test_visited_nodes_cannot_be_pointed_at_and_all_others_can():
    batch = batch_of(7, 7)
    found = scores(network(), batch, batch["rank"], [1, 2, 3, 4, 5])
    visited = torch.stack([batch["rank"] < step for step in range(1, 6)], dim=1)
    assert (found[visited] == -1e9).all()
    assert (found[~visited].abs() < 1e3).all()


def test_only_start_and_current_matter_of_the_visited_nodes():
    batch = batch_of(8)
    order = order_of(batch["rank"])[0]
    before = scores(network(), batch, batch["rank"], [4])[0, 0]
    for place, matters in ((1, False), (2, False), (0, True), (3, True), (5, True)):
        moved = {name: part.clone() for name, part in batch.items()}
        moved["points"][0, order[place]] += 0.3
        moved["distances"] = torch.cdist(moved["points"], moved["points"])
        after = scores(network(), moved, batch["rank"], [4])[0, 0]
        still_open = [node for node in order[4:] if node != order[place]]
        assert torch.allclose(before[still_open], after[still_open], atol=1e-6) is not matters


def test_nodes_have_no_order():
    batch, shuffle = batch_of(9, 9), torch.randperm(9, generator=torch.Generator().manual_seed(0))
    moved = {
        "points": batch["points"][:, shuffle],
        "distances": batch["distances"][:, shuffle][:, :, shuffle],
        "rank": batch["rank"][:, shuffle],
    }
    steps = [1, 4, 7]
    expected = scores(network(), batch, batch["rank"], steps)[:, :, shuffle]
    torch.testing.assert_close(scores(network(), moved, moved["rank"], steps), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(decode(network(), moved), decode(network(), batch)[:, shuffle])


def test_padding_changes_nothing():
    data, workload, model = instances(5, 9, 7), PointerNet(), network()
    together = PointerNet.collate([data[i] for i in range(3)])
    alone = [PointerNet.collate([data[i]]) for i in range(3)]
    assert order_of(decode(model, together)) == [order_of(decode(model, one))[0] for one in alone]
    losses = [workload.loss(model, one).item() for one in alone]
    assert workload.loss(model, together).item() == pytest.approx(sum(losses) / 3, rel=1e-5)
    lengths = tour_lengths(together["distances"], together["rank"]).tolist()
    assert lengths == [tour_lengths(one["distances"], one["rank"]).item() for one in alone]
    gap = workload.evaluate(model, [together])["gap"]
    assert gap == pytest.approx(sum(workload.evaluate(model, [one])["gap"] for one in alone) / 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_nearly_the_same_loss(dtype):
    batch, model = batch_of(5, 9, 9), network().train()
    expected = PointerNet().loss(model, batch).item()
    with torch.autocast("cpu", dtype=dtype):
        loss = PointerNet().loss(model, batch)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=0.02)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_decoding_is_the_best_open_node_at_every_step():
    batch, model = batch_of(7), network(seed=3)
    order = [int((batch["rank"][0] == 0).int().argmax())]
    while len(order) < 7:
        rank = torch.full((1, 7), 99)
        rank[0, order] = torch.arange(len(order))
        best = scores(model, batch, rank, [len(order)])[0, 0]
        order.append(max((node for node in range(7) if node not in order), key=lambda node: best[node].item()))
    assert order_of(decode(model, batch)) == [order]


@pytest.mark.parametrize("seed", range(2))
def test_no_decoded_tour_is_shorter_than_the_shortest_of_all(seed):
    batch = batch_of(3, 4, 5, 6, 7, 7, seed=seed)
    rank = decode(network(seed), batch)
    decoded, teacher = tour_lengths(batch["distances"], rank), tour_lengths(batch["distances"], batch["rank"])
    for i, order in enumerate(order_of(rank)):
        distances = batch["distances"][i]
        count = len(order)
        assert sorted(order) == list(range(count))
        best = min(length_of(distances, [0, *rest]) for rest in itertools.permutations(range(1, count)))
        assert teacher[i].item() == pytest.approx(best, rel=1e-4)
        assert decoded[i].item() == pytest.approx(length_of(distances, order), rel=1e-5)
        assert decoded[i].item() >= best * (1 - 1e-6)


def augmented(batch: TourBatch, keys: Tensor | None = None, **knobs: Any) -> TourBatch:
    """Returns the batch after augmentation; the tensors given stay as they are."""
    copies = {name: part.clone() for name, part in batch.items()}
    keys = draws.keys(0, 0, torch.arange(len(batch["rank"]))) if keys is None else keys
    return PointerNet().augment(copies, keys, Config(knobs_of(**knobs)), "")


def edges(rank: Tensor) -> list[set[frozenset[int]]]:
    """Returns each tour as its edges, whatever its start and direction."""
    return [{frozenset(pair) for pair in itertools.pairwise(order + order[:1])} for order in order_of(rank)]


def symmetry(points: Tensor, before: Tensor) -> tuple[bool, int, int]:
    """Returns by which of the square's eight symmetries the points were moved: axes swapped, and the signs."""
    for swapped, x, y in itertools.product((False, True), (1, -1), (1, -1)):
        moved = before * torch.tensor([x, y])
        if torch.equal(points, moved.flip(-1) if swapped else moved):
            return swapped, x, y
    raise AssertionError("not one of the eight")


def test_augmented_instances_are_the_same_instances():
    batch = batch_of(*[6, 9] * 60)
    found = augmented(batch, augmentation=2.0)
    assert torch.equal(found["rank"] < 0, batch["rank"] < 0)
    assert torch.equal(found["distances"], batch["distances"])
    assert edges(found["rank"]) == edges(batch["rank"])
    assert {order[0] for order in order_of(found["rank"])} == set(range(9))
    assert len({symmetry(*pair) for pair in zip(found["points"], batch["points"], strict=True)}) == 8
    orders = zip(order_of(batch["rank"]), order_of(found["rank"]), strict=True)
    turned = [before[1] != after[(after.index(before[0]) + 1) % len(after)] for before, after in orders]
    assert 0.3 < sum(turned) / len(turned) < 0.7  # gone round the other way


def test_the_knob_is_how_many_instances_are_augmented():
    batch = batch_of(*[6] * 200)
    for strength, share in ((0.0, 0.0), (1.0, 0.5), (2.0, 1.0)):
        found = augmented(batch, augmentation=strength)
        changed = (found["rank"] != batch["rank"]).any(dim=1) | (found["points"] != batch["points"]).flatten(1).any(
            dim=1
        )
        # Of 8 * 6 * 2 equal instances one is the instance itself.
        assert changed.double().mean().item() == pytest.approx(share * 95 / 96, abs=0.0 if share == 0 else 0.06)


def test_augmentation_depends_on_the_keys_alone():
    data = instances(6, 9, 7, 9)
    keys = torch.tensor([11, 22, 33, 44])
    together = augmented(PointerNet.collate([data[i] for i in range(4)]), keys, augmentation=2.0)
    for i in range(4):
        alone = augmented(PointerNet.collate([data[i]]), keys[i : i + 1], augmentation=2.0)
        count = len(data[i].rank)
        for name in ("points", "rank"):
            assert torch.equal(together[name][i, :count], alone[name][0])


class Mixed(PointerNet):
    """Instances of 5 to 7 nodes."""

    def dataset(self, config: Config, split: Split) -> Instances:
        return instances(*[5, 6, 7, 7] * 2, seed=1)


def test_it_learns_shortest_tours_by_heart():
    torch.manual_seed(0)
    model, workload, batch = Pointer(width=32, layers=2, dropout=0.0), PointerNet(), batch_of(*[8] * 8)
    before = workload.evaluate(model, [batch])["gap"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        optimizer.step()
    assert workload.evaluate(model.eval(), [batch])["gap"] < min(0.005, before / 4)


def test_baselines_are_the_nearest_node_and_the_mean_tour():
    workload = Mixed()
    nearest, chance = [], []
    data = workload.dataset(Config(), "val")
    for i in range(len(data)):
        distances, rank = data[i].distances, data[i].rank
        shortest = length_of(distances, order_of(rank[None])[0])
        lengths = [length_of(distances, [0, *rest]) for rest in itertools.permutations(range(1, len(rank)))]
        chance.append(sum(lengths) / len(lengths) / shortest - 1)
        order = [int((rank == 0).int().argmax())]
        while len(order) < len(rank):
            order.append(min(set(range(len(rank))) - {*order}, key=lambda j: float(distances[order[-1], j])))
        nearest.append(length_of(distances, order) / shortest - 1)
    found = workload.baselines(Config())
    assert found["nearest neighbour"]["gap"] == pytest.approx(sum(nearest) / len(nearest), rel=1e-4)
    assert found["random tour"]["gap"] == pytest.approx(sum(chance) / len(chance), rel=1e-4)


def test_refuses_a_width_that_the_heads_do_not_divide():
    with pytest.raises(WorkloadError, match=r"knobs\.hidden_size=50: expected a multiple of 4"):
        PointerNet().model(Config(knobs_of(hidden_size=50)))
