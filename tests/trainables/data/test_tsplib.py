"""TSPLIB: each metric by its definition, a published optimum, and what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import fast_tsp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trainables.data.errors import DataError
from trainables.data.tsplib import Problem, read_problem, read_tour

# Columns of burma14.tsp as TSPLIB publishes them; the shortest tour has 3323.
BURMA14 = """16.47 96.10  16.47 94.44  20.09 92.54  22.39 93.37  25.23 97.24  22.00 96.05  20.47 97.02
17.20 96.29  16.30 97.38  14.05 98.12  16.53 97.38  21.52 95.59  19.41 97.13  20.09 94.55"""

PAIRS: dict[
    str, list[tuple[tuple[float, float], tuple[float, float], int]]
] = {  # kind: two nodes and their distance, worked by hand
    "EUC_2D": [((0, 0), (1.5, 2), 3), ((0, 0), (1, 1), 1), ((5, 5), (5, 5), 0)],  # 2.5 goes up, as in C
    "CEIL_2D": [((0, 0), (1.5, 2), 3), ((0, 0), (1, 1), 2), ((0, 0), (3, 4), 5)],
    "ATT": [((0, 0), (10, 0), 4), ((0, 0), (30, 10), 10), ((0, 0), (0, 20), 7)],  # roots of 10, 100 and 40
    "GEO": [  # kilometres of the arc, cut, plus 1; a degree is 111.3 km, half a degree is written .30
        ((0.00, 0.00), (0.00, 1.00), 112),
        ((0.00, 0.00), (0.00, 0.30), 56),
        ((-0.30, 0.00), (0.30, 0.00), 112),
        ((0.00, 179.30), (0.00, -179.30), 112),
        ((90.00, 0.00), (90.00, 120.00), 1),
        ((12.30, 7.15), (12.30, 7.15), 1),
    ],
}


def written(path: Path, kind: str, body: str, count: int, more: str = "") -> Path:
    """Returns the path of a problem in the published layout."""
    path.write_text(
        f"NAME : {path.stem}\nTYPE : TSP\nCOMMENT : of a test: no more\nDIMENSION : {count}\n"
        f"EDGE_WEIGHT_TYPE : {kind}\n{more}{body}EOF\n"
    )
    return path


def coordinates(rows: list[tuple[float, float]]) -> str:
    return "NODE_COORD_SECTION\n" + "".join(f"{i} {x!r} {y!r}\n" for i, (x, y) in enumerate(rows, 1))


def all_distances(problem: Problem) -> NDArray[np.float64]:
    nodes = np.arange(len(problem))
    return problem.distances(nodes, nodes)


def shortest(problem: Problem) -> int:
    """Returns the length of the shortest tour of a small problem."""
    weights = all_distances(problem).astype(np.int64).tolist()
    return int(fast_tsp.compute_cost(fast_tsp.find_tour(weights), weights))


@pytest.mark.parametrize("kind", PAIRS)
def test_distances_are_those_of_the_definition(tmp_path: Path, kind: str) -> None:
    for first, second, expected in PAIRS[kind]:
        problem = read_problem(written(tmp_path / "p.tsp", kind, coordinates([first, second, (9, 9)]), 3))
        found = all_distances(problem)
        assert found[0, 1] == found[1, 0] == expected
        assert np.diag(found).tolist() == [0, 0, 0]


def test_a_published_optimum_comes_out(tmp_path: Path) -> None:
    numbers = [float(word) for word in BURMA14.split()]
    rows = list(zip(numbers[::2], numbers[1::2], strict=True))
    assert shortest(read_problem(written(tmp_path / "burma14.tsp", "GEO", coordinates(rows), 14))) == 3323


def test_geo_points_are_near_each_other_across_the_date_line(tmp_path: Path) -> None:
    rows = [(60.00, 179.30), (60.00, -179.30), (59.00, 180.00)]
    points = read_problem(written(tmp_path / "p.tsp", "GEO", coordinates(rows), 3)).points
    assert np.ptp(points[:, 0]) == pytest.approx(np.cos(np.radians(59.6667)), rel=1e-4)  # a degree, at 60 north
    assert points[:, 1].tolist() == [60.0, 60.0, 59.0]


def test_reads_what_is_written_in_other_ways(tmp_path: Path) -> None:
    rows = [(0.0, 0.0), (3.0, 4.0), (6.0, 8.0)]
    plain = written(tmp_path / "p.tsp", "EUC_2D", coordinates(rows), 3)
    text = plain.read_text()
    variants = {
        "narrow": text.replace(" : ", ":"),
        "author": text.replace("TYPE : TSP", "TYPE: TSP (M.~Hofmeister)"),
        "windows": text.replace("\n", "\r\n"),
        "no end": text.replace("EOF\n", "\n\n"),
        "exponents": text.replace("3.0 4.0", "3.00000e+00   4.0E0"),
        "padded ids": text.replace("\n1 ", "\n  0001 "),
        "mixed rows": text.replace("1 0.0 0.0\n", "").replace("EOF", "1 0.0 0.0\nEOF"),
        "old encoding": text.replace("of a test", "of M\u00fcnster"),
    }
    for variant in variants.values():
        plain.write_text(variant, encoding="latin-1", newline="")
        assert (all_distances(read_problem(plain))[0] == [0, 5, 10]).all()
    packed = tmp_path / "p.tsp.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert len(read_problem(packed)) == 3


HEAD = "NAME : x\nTYPE : TSP\nDIMENSION : 3\nEDGE_WEIGHT_TYPE : EUC_2D\n"
NODES = "NODE_COORD_SECTION\n1 0 0\n2 1 0\n3 0 1\nEOF\n"
REFUSED = {
    r"x\.tsp: DIMENSION: found 2; allowed: a whole number >= 3": HEAD.replace("3", "2") + NODES,
    r"x\.tsp: EDGE_WEIGHT_TYPE: found 'EXPLICIT'; allowed: EUC_2D": HEAD.replace("EUC_2D", "EXPLICIT") + NODES,
    r"x\.tsp: found no NODE_COORD_SECTION; allowed: one with a row": HEAD,
    r"x\.tsp:7: NODE_COORD_SECTION: found '2 1'; allowed: id, x and y": HEAD + NODES.replace("2 1 0", "2 1"),
    r"x\.tsp:7: NODE_COORD_SECTION: found node 1 a second time": HEAD + NODES.replace("2 1 0", "1 1 0"),
    r"x\.tsp:8: NODE_COORD_SECTION: found '3 0 1e999'; allowed: numbers": HEAD + NODES.replace("3 0 1", "3 0 1e999"),
    r"x\.tsp:7: NODE_COORD_SECTION: found 2 nodes; allowed: 3": HEAD + NODES.replace("3 0 1\n", ""),
    r"x\.tsp:5: found 'FIXED_EDGES_SECTION'; allowed: KEYWORD": HEAD + "FIXED_EDGES_SECTION\n1 2\n-1\n",
    r"x\.tsp:5: found DIMENSION a second time; allowed: once": HEAD + "DIMENSION : 4\n" + NODES,
}
"""Message -> file."""


@pytest.mark.parametrize("message", REFUSED)
def test_refuses_by_line_and_field(tmp_path: Path, message: str) -> None:
    (tmp_path / "x.tsp").write_text(REFUSED[message])
    with pytest.raises(DataError, match=message):
        read_problem(tmp_path / "x.tsp")


def test_refuses_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.tsp: found .*No such file.*; allowed: a file that can be read"):
        read_problem(tmp_path / "none.tsp")
    (tmp_path / "x.tsp.gz").write_bytes(gzip.compress((HEAD + NODES).encode())[:-9])
    with pytest.raises(DataError, match=r"x\.tsp\.gz: found .*; allowed: a file that can be read to its end"):
        read_problem(tmp_path / "x.tsp.gz")


def tour(path: Path, rows: str, head: str = "TYPE : TOUR\nDIMENSION : 4\n") -> Path:
    path.write_text(f"NAME : x.opt.tour\nCOMMENT : of length 7\n{head}TOUR_SECTION\n{rows}")
    return path


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(7)), st.integers(1, 7), st.booleans())
def test_tours_round_trip(tmp_path_factory: pytest.TempPathFactory, order: list[int], columns: int, ends: bool) -> None:
    words = [str(node + 1) for node in order] + ["-1"] * ends
    rows = "\n".join(" ".join(words[i : i + columns]) for i in range(0, len(words), columns))
    path = tour(tmp_path_factory.mktemp("t") / "x.tour", rows + "\nEOF\n", head="TYPE: TOUR\n")
    assert read_tour(path, 7).tolist() == list(order)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("1\n2\n2\n", r"x:8: TOUR_SECTION: found node 2 a second time; allowed: each of 1 to 4 once"),
        ("1\n5\n", r"x:7: TOUR_SECTION: found node 5; allowed: each of 1 to 4 once"),
        ("1\n2\n3\n-1\n", r"x:9: TOUR_SECTION: found 3 nodes; allowed: all 4 of the problem"),
        ("", r"x: found no TOUR_SECTION; allowed: one"),
    ],
)
def test_refuses_what_is_no_tour(tmp_path: Path, rows: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_tour(tour(tmp_path / "x", rows), 4)


def test_refuses_the_tour_of_another_problem(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x: DIMENSION: found 4; allowed: 5, as the problem has"):
        read_tour(tour(tmp_path / "x", "1\n2\n3\n4\n"), 5)
    with pytest.raises(DataError, match=r"x: TYPE: found 'TSP'; allowed: TOUR"):
        read_tour(tour(tmp_path / "x", "1\n", head="TYPE : TSP\n"), 4)
