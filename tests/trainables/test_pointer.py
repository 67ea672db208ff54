"""The pointer network: what it may see and point at, that decoding is what it says, and that equal tours stay equal."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.fakes import knobs_of
from trainables import draws, kinds, precision
from trainables.data.tour_ranks import next_along, tour_lengths, two_opt
from trainables.data.tours import euclidean, solved
from trainables.resident import Resident
from trainables.workload import Config, Split, WorkloadError
from trainables.workloads.pointer import (
    Decoding,
    Instances,
    LstmPointer,
    Pointer,
    PointerNet,
    PointerNetwork,
    TourBatch,
    decode,
    features,
)

pytestmark = pytest.mark.workload
Make = Callable[..., PointerNetwork]
networks = pytest.mark.parametrize("make", [Pointer, LstmPointer])


def instances(*sizes: int, seed: int = 0) -> Instances:
    """Returns solved instances of so many nodes each, their points uniform."""
    generator = np.random.default_rng(seed)
    points = [generator.random((n, 2)) for n in sizes]
    return Instances([solved(p, euclidean(p)) for p in points])


def batch_of(*sizes: int, seed: int = 0) -> TourBatch:
    data = instances(*sizes, seed=seed)
    return PointerNet.collate([data[i] for i in range(len(data))])


def network(seed: int = 0, make: Make = Pointer, **options: Any) -> PointerNetwork:
    """Returns a small network in eval mode; its taste for the nearest node is off, so that tours differ from it."""
    torch.manual_seed(seed)
    model = make(width=16, layers=options.pop("layers", 2), dropout=0.0, **options).eval()
    nn.init.zeros_(model.nearness)
    if isinstance(model, LstmPointer):  # else scores hardly differ, nor does what was visited change them
        for weight in model.parameters():
            weight.data *= 3.0
    return model


def scores(model: nn.Module, batch: TourBatch, rank: Tensor, steps: list[int]) -> Tensor:
    """Returns the scores at some steps; all from step 1 on go through a network that remembers them."""
    with torch.no_grad():
        found, _ = model(features(batch, rank, torch.arange(1, max(steps) + 1)), batch["distances"])
    return torch.stack([found[:, step - 1] for step in steps], dim=1)


def order_of(rank: Tensor) -> list[list[int]]:
    """Returns each tour as its nodes in order, padding left out."""
    return [[int(i) for i in row.argsort() if row[i] >= 0] for row in rank]


def length_of(distances: Tensor, order: list[int]) -> float:
    return sum(float(distances[a, b]) for a, b in zip(order, order[1:] + order[:1], strict=True))


@networks
def test_visited_nodes_cannot_be_pointed_at_and_all_others_can(make):
    batch = batch_of(7, 7)
    found = scores(network(make=make), batch, batch["rank"], [1, 2, 3, 4, 5])
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


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("ways", [1, 2])
def test_scores_step_by_step_are_those_of_one_pass(layers, ways):
    batch, model = batch_of(6, 9, 9), network(0, LstmPointer, layers=layers, ways=ways)
    history: tuple[Tensor, ...] = ()
    for step in range(1, 8):
        found, history = model(features(batch, batch["rank"], torch.tensor([step])), batch["distances"], history)
        whole = scores(model, batch, batch["rank"], [step])
        torch.testing.assert_close(found.detach(), whole, rtol=1e-4, atol=1e-5)


def test_what_was_visited_changes_the_scores_of_other_nodes():
    batch, model = batch_of(8), network(make=LstmPointer)
    inputs = features(batch, batch["rank"], torch.tensor([1, 2, 3]))
    visited = inputs.clone()
    visited[:, 2, batch["rank"][0] == 5, 2] = 1.0  # is_visited of a node at the last of the steps alone
    before, after = (model(given, batch["distances"])[0][0, 2].detach() for given in (inputs, visited))
    still_open = (batch["rank"][0] >= 3) & (batch["rank"][0] != 5)
    assert (before - after)[still_open].abs().min() > 1e-4


@networks
def test_nodes_have_no_order(make):
    batch, shuffle = batch_of(9, 9), torch.randperm(9, generator=torch.Generator().manual_seed(0))
    moved = {
        "points": batch["points"][:, shuffle],
        "distances": batch["distances"][:, shuffle][:, :, shuffle],
        "rank": batch["rank"][:, shuffle],
    }
    steps = [1, 4, 7]
    model = network(make=make)
    expected = scores(model, batch, batch["rank"], steps)[:, :, shuffle]
    torch.testing.assert_close(scores(model, moved, moved["rank"], steps), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(decode(model, moved), decode(model, batch)[:, shuffle])


@networks
@pytest.mark.parametrize("decoding", [Decoding(), Decoding("beam", 4), Decoding("sample", 4)])
def test_padding_changes_nothing(make, decoding):
    data, workload, model = instances(5, 9, 7), PointerNet(), network(make=make, decoding=decoding)
    together = PointerNet.collate([data[i] for i in range(3)])
    alone = [PointerNet.collate([data[i]]) for i in range(3)]
    whole = order_of(decode(model, together, decoding))
    assert whole == [order_of(decode(model, one, decoding))[0] for one in alone]
    losses = [workload.loss(model, one).item() for one in alone]
    assert workload.loss(model, together).item() == pytest.approx(sum(losses) / 3, rel=1e-5)
    lengths = tour_lengths(together["distances"], together["rank"]).tolist()
    assert lengths == [tour_lengths(one["distances"], one["rank"]).item() for one in alone]
    gap = workload.evaluate(model, [together])["gap"]
    assert gap == pytest.approx(sum(workload.evaluate(model, [one])["gap"] for one in alone) / 3)


# oneDNN, which runs an LSTM on a CPU, has no fp16.
@pytest.mark.parametrize(
    ("make", "dtype"), [(Pointer, torch.bfloat16), (Pointer, torch.float16), (LstmPointer, torch.bfloat16)]
)
def test_half_precision_gives_nearly_the_same_loss(make, dtype):
    batch, model = batch_of(5, 9, 9), network(make=make).train()
    expected = PointerNet().loss(model, batch).item()
    with torch.autocast("cpu", dtype=dtype):
        loss = PointerNet().loss(model, batch)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=0.02)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@networks
@pytest.mark.parametrize("decoding", [Decoding(), Decoding("beam", 1), Decoding("beam", 2), Decoding("beam", 5)])
def test_decoding_keeps_the_likeliest_ways_at_every_step(make, decoding):
    """Of one way, as greedily, that is the best open node."""
    whole, model, expected = batch_of(*[8] * 12), network(seed=3, make=make), []
    for batch in ({name: part[i : i + 1] for name, part in whole.items()} for i in range(12)):
        ways = [(0.0, [int((batch["rank"][0] == 0).int().argmax())])]
        for step in range(1, 7):
            longer = []
            for total, order in ways:
                rank = torch.full((1, 8), 99)
                rank[0, order] = torch.arange(step)
                likely = scores(model, batch, rank, [step])[0, 0].log_softmax(dim=0).tolist()
                longer += [(total + likely[node], [*order, node]) for node in range(8) if node not in order]
            ways = sorted(longer, reverse=True)[: decoding.tours]
        tours = [[*order, *{*range(8)}.difference(order)] for _, order in ways]
        expected.append(min((length_of(batch["distances"][0], order), order) for order in tours)[1])
    assert order_of(decode(model, whole, decoding)) == expected


@networks
def test_a_beam_that_holds_all_tours_finds_the_shortest(make):
    batch = batch_of(5, 6, 4)
    rank = decode(network(make=make), batch, Decoding("beam", 120))
    torch.testing.assert_close(*(tour_lengths(batch["distances"], one) for one in (rank, batch["rank"])))


@pytest.mark.parametrize("way", ["beam", "sample"])
def test_more_tours_are_shorter_on_average(way):
    batch, model = batch_of(*[9] * 60), network(make=LstmPointer)
    of = [decode(model, batch, Decoding(way, tours)) for tours in (1, 4, 16)]
    one, four, sixteen = (tour_lengths(batch["distances"], rank) for rank in of)
    assert one.mean() > four.mean() > sixteen.mean()
    assert (sixteen <= one).double().mean() > 0.8
    assert torch.equal(of[2], decode(model, batch, Decoding(way, 16))), "the same tours at each evaluation"


@networks
@pytest.mark.parametrize("decoding", [Decoding(), Decoding("beam", 9), Decoding("sample", 3)])
@pytest.mark.parametrize("seed", range(2))
def test_no_decoded_tour_is_shorter_than_the_shortest_of_all(seed, decoding, make):
    batch = batch_of(3, 4, 5, 6, 7, 7, seed=seed)
    rank = decode(network(seed, make), batch, decoding)
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


@pytest.mark.parametrize(("make", "width"), [(Pointer, 32), (LstmPointer, 64)])
def test_it_learns_shortest_tours_by_heart(make, width):
    torch.manual_seed(0)
    model, workload, batch = make(width=width, layers=2, dropout=0.0), PointerNet(), batch_of(*[8] * 8)
    before = workload.evaluate(model, [batch])["gap"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60 if make is Pointer else 120):
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
    assert "2-opt" not in found
    several = workload.baselines(Config(options={"decode": "beam"}))
    assert 0.0 <= several["2-opt"]["gap"] <= found["nearest neighbour"]["gap"]


def test_two_opt_ends_where_no_exchange_of_edges_helps():
    batch = batch_of(8, 5, 8, 3)
    start = torch.stack([torch.arange(8).where(row >= 0, -1) for row in batch["rank"]])
    assert torch.equal(two_opt(batch["distances"], batch["rank"]), batch["rank"]), "the shortest stay"
    found = two_opt(batch["distances"], start)
    for distances, before, order in zip(batch["distances"], order_of(start), order_of(found), strict=True):
        length = length_of(distances, order)
        assert sorted(order) == before
        assert length <= length_of(distances, before)
        for a, b in itertools.combinations(range(len(order) + 1), 2):
            assert length_of(distances, order[:a] + order[a:b][::-1] + order[b:]) >= length - 1e-5


def test_off_its_tour_the_teacher_goes_to_the_nearest_rest_of_it():
    teacher = torch.tensor([[0, 1, 2, 3, 4, 5, -1], [3, 2, 1, 0, 4, 5, 6]])
    steps = torch.arange(1, 5)
    own = next_along(teacher, teacher, steps)
    assert own.tolist() == [[1, 2, 3, 4], [2, 1, 0, 4]]
    rank = torch.tensor([[0, 7, 7, 7, 7, 1, -1], [7, 2, 7, 0, 7, 1, 7]])
    # After 0, 5 the other way round; after 3, 5, 1 forwards, where both ways are as near.
    assert [row[step - 1].item() for row, step in zip(next_along(teacher, rank, steps), (2, 3), strict=True)] == [4, 0]


@networks
def test_what_is_not_taught_goes_as_the_network_decodes(make):
    batch, model = batch_of(6, 9, 9), network(2, make)
    none, all_steps = (torch.full((3, 9), is_taught) for is_taught in (False, True))
    assert torch.equal(decode(model, batch, taught=none), decode(model, batch))
    assert torch.equal(decode(model, batch, taught=all_steps), batch["rank"])
    workload = PointerNet()
    losses = [workload.loss(model, {**batch, "taught": taught}) for taught in (none, all_steps)]
    assert losses[1].item() == pytest.approx(workload.loss(model, batch).item(), rel=1e-6)
    assert losses[0].requires_grad
    assert losses[0].item() != pytest.approx(losses[1].item(), rel=1e-3)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_teacher_forcing_is_the_share_of_steps_that_are_taught(share):
    batch, keys = batch_of(*[9] * 200), draws.keys(0, 0, torch.arange(200))
    config = Config(knobs_of(augmentation=0.0), {"teacher_forcing": share})
    one, two = (PointerNet().augment({n: t.clone() for n, t in batch.items()}, keys, config, "") for _ in range(2))
    taught = one.get("taught", torch.ones(1))
    assert taught.double().mean().item() == pytest.approx(share, abs=0.04)
    assert share == 1.0 or torch.equal(taught, two["taught"])


def test_system_knobs_leave_alone_what_an_lstm_learns():
    options = {"nodes": 6, "train_samples": 64, "val_samples": 8, "teacher_forcing": 0.5}
    config = Config(knobs_of(network="lstm", hidden_size=16, batch_size=8, micro_batch_size=8), options)
    changes = {"micro_batch_size": 4, "activation_checkpointing": True, "ram_cache": True}
    assert not kinds.differing(Resident(PointerNet()), config, changes)


@networks
def test_recomputed_blocks_keep_less_and_change_nothing(make):
    batch, model = batch_of(*[9] * 4), network(make=make).train()
    found = []
    for is_on in (False, True):
        kept: list[int] = []
        pack = lambda tensor, kept=kept: kept.append(tensor.nbytes) or tensor  # noqa: E731
        with precision.checkpointed(PointerNet.blocks(model), is_on):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = PointerNet().loss(model, batch)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append((sum(kept), torch.cat([g.flatten() for g in gradients])))
    assert found[1][0] < found[0][0] / 2
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"decode": "best"}, r"workload\.decode=best: expected one of greedy, beam, sample"),
        ({"beam_width": 0}, r"workload\.beam_width=0: expected a whole number >= 1"),
        ({"sampled_tours": 2.5}, r"workload\.sampled_tours=2\.5: expected a whole number"),
        ({"teacher_forcing": 1.5}, r"workload\.teacher_forcing=1\.5: expected a number >= 0 and <= 1"),
        ({"bidirectional": "no"}, r"workload\.bidirectional=no: expected one of false, true"),
        ({}, r"knobs\.hidden_size=50: expected a multiple of 4"),
    ],
)
def test_refuses_what_means_nothing(options, allowed):
    with pytest.raises(WorkloadError, match=allowed):
        PointerNet().model(Config(knobs_of(hidden_size=50), options))
