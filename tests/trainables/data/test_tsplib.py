"""TSPLIB: each metric by its definition, each matrix layout as its name says, published optima, and what is refused."""

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

# Columns of burma14.tsp and rows of gr17.tsp as TSPLIB publishes them; the shortest tours have 3323 and 2085.
BURMA14 = """16.47 96.10  16.47 94.44  20.09 92.54  22.39 93.37  25.23 97.24  22.00 96.05  20.47 97.02
17.20 96.29  16.30 97.38  14.05 98.12  16.53 97.38  21.52 95.59  19.41 97.13  20.09 94.55"""
GR17 = """0 633 0 257 390 0 91 661 228 0 412 227 169 383 0 150 488 112 120 267 0 80 572 196 77 351 63 0
134 530 154 105 309 34 29 0 259 555 372 175 338 264 232 249 0 505 289 262 476 196 360 444 402 495 0
353 282 110 324 61 208 292 250 352 154 0 324 638 437 240 421 329 297 314 95 578 435 0
70 567 191 27 346 83 47 68 189 439 287 254 0 211 466 74 182 243 105 150 108 326 336 184 391 145 0
268 420 53 239 199 123 207 165 383 240 140 448 202 57 0 246 745 472 237 528 364 332 349 202 685 542 157 289 426 483 0
121 518 142 84 297 35 29 36 236 390 238 301 55 96 153 336 0"""

PAIRS: dict[
    str, list[tuple[tuple[float, float], tuple[float, float], int]]
] = {  # kind: two nodes and their distance, worked by hand
    "EUC_2D": [((0, 0), (1.5, 2), 3), ((0, 0), (1, 1), 1), ((5, 5), (5, 5), 0)],  # 2.5 goes up, as in C
    "CEIL_2D": [((0, 0), (1.5, 2), 3), ((0, 0), (1, 1), 2), ((0, 0), (3, 4), 5)],
    "MAN_2D": [((0, 0), (1.25, -1.25), 3), ((1, 2), (4, 6), 7)],
    "MAX_2D": [((0, 0), (2.5, 1), 3), ((1, 2), (4, 6), 4)],
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


def test_published_optima_come_out(tmp_path: Path) -> None:
    numbers = [float(word) for word in BURMA14.split()]
    rows = list(zip(numbers[::2], numbers[1::2], strict=True))
    assert shortest(read_problem(written(tmp_path / "burma14.tsp", "GEO", coordinates(rows), 14))) == 3323
    body = f"EDGE_WEIGHT_SECTION\n{GR17}\n"
    gr17 = read_problem(written(tmp_path / "gr17.tsp", "EXPLICIT", body, 17, "EDGE_WEIGHT_FORMAT : LOWER_DIAG_ROW \n"))
    assert shortest(gr17) == 2085


# What the names say, as loops: which entries of the matrix come in which order.
ORDERS = {
    "FULL_MATRIX": lambda n: [(i, j) for i in range(n) for j in range(n)],
    "UPPER_ROW": lambda n: [(i, j) for i in range(n) for j in range(n) if j > i],
    "LOWER_ROW": lambda n: [(i, j) for i in range(n) for j in range(n) if j < i],
    "UPPER_DIAG_ROW": lambda n: [(i, j) for i in range(n) for j in range(n) if j >= i],
    "LOWER_DIAG_ROW": lambda n: [(i, j) for i in range(n) for j in range(n) if j <= i],
    "UPPER_COL": lambda n: [(i, j) for j in range(n) for i in range(n) if i < j],
    "LOWER_COL": lambda n: [(i, j) for j in range(n) for i in range(n) if i > j],
    "UPPER_DIAG_COL": lambda n: [(i, j) for j in range(n) for i in range(n) if i <= j],
    "LOWER_DIAG_COL": lambda n: [(i, j) for j in range(n) for i in range(n) if i >= j],
}


@pytest.mark.parametrize("form", ORDERS)
@settings(max_examples=8, deadline=None)
@given(count=st.integers(3, 9), seed=st.integers(0, 99), columns=st.integers(1, 12))
def test_matrices_round_trip(
    tmp_path_factory: pytest.TempPathFactory, form: str, count: int, seed: int, columns: int
) -> None:
    matrix = np.random.default_rng(seed).integers(0, 1000, (count, count))
    matrix = np.triu(matrix, 1) + np.triu(matrix, 1).T + 9999 * np.eye(count, dtype=int)  # no way to itself, as in br17
    numbers = [str(matrix[entry]) for entry in ORDERS[form](count)]
    lines = [" ".join(numbers[i : i + columns]) for i in range(0, len(numbers), columns)]  # rows may break anywhere
    body = "EDGE_WEIGHT_SECTION\n" + "\n".join(lines) + "\n"
    path = written(tmp_path_factory.mktemp("m") / "m.tsp", "EXPLICIT", body, count, f"EDGE_WEIGHT_FORMAT : {form}\n")
    assert (all_distances(read_problem(path)) == matrix - 9999 * np.eye(count)).all()


def test_a_matrix_of_points_is_laid_out_as_they_are(tmp_path: Path) -> None:
    points = np.random.default_rng(0).uniform(0, 1e6, (12, 2))
    matrix = np.rint(np.hypot(*(points[:, None] - points[None]).transpose(2, 0, 1))).astype(int)
    body = "EDGE_WEIGHT_SECTION\n" + "\n".join(" ".join(map(str, row)) for row in matrix) + "\n"
    path = written(tmp_path / "m.tsp", "EXPLICIT", body, 12, "EDGE_WEIGHT_FORMAT: FULL_MATRIX\n")
    found = read_problem(path).points
    again = np.hypot(*(found[:, None] - found[None]).transpose(2, 0, 1))
    assert np.abs(again - matrix).max() < 3.0  # of a million: the matrix is rounded to 1
    shown = "DISPLAY_DATA_SECTION\n" + "".join(f"{i} {i} {-i}\n" for i in range(1, 13))
    drawn = read_problem(written(path, "EXPLICIT", body + shown, 12, "EDGE_WEIGHT_FORMAT: FULL_MATRIX\n"))
    assert drawn.points[2].tolist() == [3.0, -3.0]
    assert (all_distances(drawn) == matrix).all()


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
MATRIX = HEAD.replace("EUC_2D", "EXPLICIT\nEDGE_WEIGHT_FORMAT : UPPER_ROW") + "EDGE_WEIGHT_SECTION\n1 2\n3\nEOF\n"
REFUSED = {
    r"x\.tsp: DIMENSION: found nothing; allowed: a whole number >= 3": HEAD.replace("DIMENSION : 3\n", "") + NODES,
    r"x\.tsp:3: DIMENSION: found 2; allowed: a whole number >= 3": HEAD.replace("3", "2") + NODES,
    r"x\.tsp:2: TYPE: found 'ATSP'; allowed: TSP": HEAD.replace("TSP", "ATSP") + NODES,
    r"x\.tsp:4: EDGE_WEIGHT_TYPE: found 'XRAY1'; allowed: EUC_2D, CEIL_2D, .*EXPLICIT": HEAD.replace("EUC_2D", "XRAY1")
    + NODES,
    r"x\.tsp: found no EDGE_WEIGHT_TYPE": HEAD.rsplit("\n", 2)[0] + "\n" + NODES,
    r"x\.tsp: found no NODE_COORD_SECTION; allowed: one row of id, x and y": HEAD,
    r"x\.tsp:7: NODE_COORD_SECTION: found '2 1'; allowed: id, x and y": HEAD + NODES.replace("2 1 0", "2 1"),
    r"x\.tsp:7: NODE_COORD_SECTION: found node 1 a second time; allowed: each of 1 to 3 once": HEAD
    + NODES.replace("2 1 0", "1 1 0"),
    r"x\.tsp:8: NODE_COORD_SECTION: found node '4'; allowed: each of 1 to 3 once": HEAD + NODES.replace("3 0", "4 0"),
    r"x\.tsp:8: NODE_COORD_SECTION: found '1e999'; allowed: a number": HEAD + NODES.replace("3 0 1", "3 0 1e999"),
    r"x\.tsp:7: NODE_COORD_SECTION: found '0,5'; allowed: a number": HEAD + NODES.replace("2 1 0", "2 1 0,5"),
    r"x\.tsp:7: NODE_COORD_SECTION: found 2 nodes up to here; allowed: 3, as DIMENSION has it": HEAD
    + NODES.replace("3 0 1\n", ""),
    r"x\.tsp:5: found 'FIXED_EDGES_SECTION'; allowed: NAME, .*TOUR_SECTION": HEAD + "FIXED_EDGES_SECTION\n1 2\n-1\n",
    r"x\.tsp:5: found '1 0 0'; allowed: NAME": HEAD + NODES.removeprefix("NODE_COORD_SECTION\n"),
    r"x\.tsp:5: found DIMENSION a second time; allowed: once": HEAD + "DIMENSION : 4\n" + NODES,
    r"x\.tsp:5: EDGE_WEIGHT_FORMAT: found 'FUNCTION'; allowed: FULL_MATRIX, UPPER_ROW": MATRIX.replace(
        "UPPER_ROW", "FUNCTION"
    ),
    r"x\.tsp:8: EDGE_WEIGHT_SECTION: found 3 numbers up to here; allowed: 6, for 3 nodes as UPPER_DIAG_ROW": (
        MATRIX.replace("UPPER_ROW", "UPPER_DIAG_ROW")
    ),
    r"x\.tsp:8: EDGE_WEIGHT_SECTION: found '-3'; allowed: a number >= 0": MATRIX.replace("\n3\n", "\n-3\n"),
    r"x\.tsp:7: EDGE_WEIGHT_SECTION: found 4 from node 1 to 2 and 1 back; allowed: the same both ways": MATRIX.replace(
        "UPPER_ROW", "FULL_MATRIX"
    ).replace("1 2\n3\n", "0 4 2\n1 0 3\n2 3 0\n"),
}
"""Message -> file. The line of an asymmetric pair is that of its first number."""


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
        ("1\n2\n2\n", r"x:8: TOUR_SECTION: found node 2 a second time; allowed: each of 1 to 4 once, then -1"),
        ("1\n5\n", r"x:7: TOUR_SECTION: found '5'; allowed: each of 1 to 4 once"),
        ("1\n2\n3\n-1\n", r"x:9: TOUR_SECTION: found 3 nodes; allowed: all 4 of the problem"),
        ("", r"x: TOUR_SECTION: found 0 nodes; allowed: all 4 of the problem"),
    ],
)
def test_refuses_what_is_no_tour(tmp_path: Path, rows: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_tour(tour(tmp_path / "x", rows), 4)


def test_refuses_the_tour_of_another_problem(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x:4: DIMENSION: found 4; allowed: 5, as the problem has"):
        read_tour(tour(tmp_path / "x", "1\n2\n3\n4\n"), 5)
    with pytest.raises(DataError, match=r"x:3: TYPE: found 'TSP'; allowed: TOUR"):
        read_tour(tour(tmp_path / "x", "1\n", head="TYPE : TSP\n"), 4)
    (tmp_path / "x").write_text("TYPE : TOUR\n")
    with pytest.raises(DataError, match=r"x: found no TOUR_SECTION; allowed: one"):
        read_tour(tmp_path / "x", 4)
