"""Where travelling salesman instances come from: the cities of the world, squares, or files of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainables.data import tsp_maps, tsplib
from trainables.data.errors import DataError
from trainables.data.tsp_instances import MOST_EXACT, Instance, Splits, places, solved

UNIFORM = "uniform"
_TSPLIB = (".tsp", ".tsp.gz")


def read_splits(data: str | None, nodes: int | None, sizes: tuple[int, int], seed: int) -> Splits:
    """Returns training and validation instances, the same for the same arguments. Raises DataError.

    `data` is None for the cities, "uniform", or the path of a file or folder. `nodes` is the size of a drawn
    instance, None to take TSPLIB problems as they are; `sizes` are how many to draw, and the most to keep of files.
    """
    if data is None or data == UNIFORM:
        if nodes is None:
            raise DataError(f"data={data}: found nodes=null; allowed with it: a path of problems that have their size")
        return tsp_maps.uniform(nodes, sizes, seed) if data else tsp_maps.drawn([tsp_maps.Cities()], nodes, sizes, seed)
    path = Path(data)
    found = sorted(path.iterdir()) if path.is_dir() else [path] if path.exists() else []
    problems = [p for p in found if p.name.endswith(_TSPLIB)]
    if problems and nodes is not None:
        return tsp_maps.drawn([_chart(p, nodes) for p in problems], nodes, sizes, seed)
    if problems:
        return _split(path, [_whole(p) for p in problems], sizes, seed)
    names = ", ".join(p.name for p in found[:8]) or "nothing"
    raise DataError(f"{path}: found {names}; allowed: {', '.join(_TSPLIB)}, a folder of them, or {UNIFORM}")


def _chart(path: Path, nodes: int) -> tsp_maps.Chart:
    problem = tsplib.read_problem(path)
    if len(problem) <= nodes:
        allowed = f"{nodes + 1} or more to draw from; workload.nodes=null takes problems as they are"
        raise DataError(f"{path}: DIMENSION: found {len(problem)} nodes; allowed: {allowed}")
    return tsp_maps.Chart(problem)


def _whole(path: Path) -> Instance:
    """Returns a problem with the tour of NAME.opt.tour or NAME.tour; a small one without is solved."""
    problem = tsplib.read_problem(path)
    nodes = np.arange(len(problem))
    distances = problem.distances(nodes, nodes)
    stem = path.name.removesuffix(".gz").removesuffix(".tsp")
    names = [f"{stem}.{kind}{packed}" for kind in ("opt.tour", "tour") for packed in ("", ".gz")]
    tour = next((path.with_name(name) for name in names if path.with_name(name).is_file()), None)
    if tour is not None:
        return Instance(problem.points, distances, tsplib.read_tour(tour, len(problem)))
    if len(problem) > MOST_EXACT:
        allowed = f"{names[0]} beside it, or workload.nodes={MOST_EXACT} or fewer to draw small instances from it"
        raise DataError(f"{path}: found {len(problem)} nodes and no tour; allowed: {allowed}")
    return solved(problem.points, distances)


def _split(path: Path, read: Sequence[Instance], sizes: tuple[int, int], seed: int) -> Splits:
    found = list({places(instance.points): instance for instance in read}.values())  # a copy of a file is no other one
    if len(found) < 2:
        raise DataError(
            f"{path}: found too few instances, {len(found)}; allowed: 2 or more, some to train on, some to judge by"
        )
    order = np.random.default_rng(seed).permutation(len(found))
    held_out = max(1, min(int(tsp_maps.VAL_SHARE * len(found)), sizes[1]))
    return Splits([found[i] for i in order[held_out:][: sizes[0]]], [found[i] for i in order[:held_out]])
