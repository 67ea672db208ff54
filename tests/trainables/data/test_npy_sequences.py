"""A folder of .npy files gives its recordings; what is no array (time, channel) of numbers is refused by file."""

import multiprocessing
import pickle
import struct
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainables.data import h5_sequences, npy_sequences
from trainables.data.errors import DataError
from trainables.data.npy_sequences import load, read_splits, some, statistics


def npy(rows: list[list[float]], descr: str = "<f4", code: str = "<f") -> bytes:
    """Returns an array in the .npy format 1.0, by its specification and without numpy."""
    shape = (len(rows), len(rows[0]) if rows else 0)
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    header += " " * (-(10 + len(header) + 1) % 64) + "\n"
    body = b"".join(struct.pack(code, value) for row in rows for value in row)
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode("latin1") + body


ONE, TWO = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [[7.0, 8.0]]
OF_LABEL = (("a", ONE), ("b", TWO))


def folders(root: Path) -> Path:
    """Returns the root, now with two recordings to train on and two to test, of the labels a and b."""
    for split in ("train", "test"):
        for label, rows in OF_LABEL:
            (root / split / label).mkdir(parents=True)
            (root / split / label / f"{split}{label}.npy").write_bytes(npy(rows))
    return root


def test_the_folders_give_the_recordings(tmp_path):
    for part in read_splits(folders(tmp_path), None, 0):
        assert [(r.label, r.steps, r.channels) for r in part] == [("a", 3, 2), ("b", 1, 2)]
        assert [load(r).tolist() for r in part] == [ONE, TWO]
        assert all(load(r).dtype == np.float32 and load(r).flags.c_contiguous for r in part)


def test_files_of_the_system_are_passed_over(tmp_path):
    root = folders(tmp_path)
    (root / "train" / ".cache").mkdir()
    for name in ("train/a/._traina.npy", "train/.cache/x.npy", "train/.DS_Store", "train/a/notes.txt"):
        (root / name).write_text("not read")
    assert len(read_splits(root, None, 0)[0]) == 2


@pytest.mark.parametrize(("descr", "code"), [(">f4", ">f"), ("<f2", "<e"), ("|u1", "B")])
def test_real_numbers_of_any_type_become_float32(tmp_path, descr, code):
    root = folders(tmp_path)
    rows = [[int(v) for v in row] for row in ONE] if code == "B" else ONE
    (root / "train" / "a" / "traina.npy").write_bytes(npy(rows, descr, code))  # type: ignore[arg-type]
    assert load(read_splits(root, None, 0)[0][0]).tolist() == ONE


def saved(array: object) -> Callable[[Path], None]:
    return lambda path: np.save(path, array)  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty file": (lambda p: p.write_bytes(b""), r"found .*; allowed: an array \(time, channel\)"),
    "pickle": (lambda p: p.write_bytes(pickle.dumps([1.0] * 9)), r"found .*; allowed: an array"),
    "cut": (lambda p: p.write_bytes(npy(ONE)[:-4]), r"found .*; allowed: an array"),
    "objects": (saved(np.array([{}])), r"found .*; allowed: an array"),
    "complex": (saved(np.ones((2, 2), "c8")), r"found numbers of type complex64; allowed: .*real numbers"),
    "one axis": (saved(np.ones(5, "f4")), r"found shape \(5,\); allowed: \(time, channel\), .* it is \(time, 1\)"),
    "no step": (saved(np.ones((0, 2), "f4")), r"found shape \(0, 2\); allowed: .*each at least 1"),
    "turned": (saved(np.ones((2, 9), "f4")), r"found 9 channels; allowed: 2, as .* has; is it \(channel, time\)\?"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_a_file_by_name(tmp_path, case):
    make, message = REFUSED[case]
    make(folders(tmp_path) / "test" / "b" / "testb.npy")
    with pytest.raises(DataError, match=r"testb\.npy: " + message):
        read_splits(tmp_path, None, 0)


def test_refuses_a_file_that_is_not_as_its_header_was(tmp_path):
    root = folders(tmp_path)
    (root / "train" / "a" / "traina.npy").write_bytes(npy([[1.0, 2.0], [3.0, float("nan")]]))
    (root / "train" / "b" / "trainb.npy").write_bytes(npy([[1e300, 2.0]], "<f8", "<d"))
    first, second = read_splits(root, None, 0)[0]
    with pytest.raises(DataError, match=r"traina\.npy: found nan at step 1, channel 1"):
        load(first)
    with pytest.raises(DataError, match=r"trainb\.npy: found inf at step 0, channel 0; allowed: .*float32"):
        load(second)
    first.path.write_bytes(npy(TWO))
    with pytest.raises(DataError, match=r"traina\.npy: found shape \(1, 2\); allowed: \(2, 2\)"):
        load(first)


def test_refuses_a_folder_of_another_shape(tmp_path):
    with pytest.raises(DataError, match=r"allowed: train/<label>/<id>\.npy; try: docs/data\.md"):
        read_splits(tmp_path, None, 0)
    with pytest.raises(DataError, match=r"gone: found no such folder"):
        read_splits(tmp_path / "gone", None, 0)
    root = folders(tmp_path)
    (root / "test" / "b").rename(root / "test" / "c")
    with pytest.raises(DataError, match=r"testb\.npy: label: found 'c'; allowed: those of train: a, b"):
        read_splits(root, None, 0)
    (root / "test").rename(root / "other")
    with pytest.raises(DataError, match=r"val or test; allowed: .*val_frac"):
        read_splits(root, None, 0)
    (root / "train" / "b").rename(root / "b")
    (root / "other" / "c").rename(root / "c")
    (root / "other").rename(root / "test")
    with pytest.raises(DataError, match="one label, 'a'; allowed: two"):
        read_splits(root, None, 0)


@settings(max_examples=25)
@given(st.integers(0, 3), st.floats(0.05, 0.95), st.integers(2, 9), st.integers(1, 5))
def test_held_out_is_a_share_of_each_label(tmp_path_factory, seed, frac, many, few):
    root = tmp_path_factory.mktemp("set")
    counts = {"a": many, "b": few}
    arrays = [("train", label, str(i), np.ones((1, 1))) for label, count in counts.items() for i in range(count)]
    npy_sequences.write(root, arrays)
    train, val = read_splits(root, frac, seed)
    assert (train, val) == read_splits(root, frac, seed)
    assert len({r.path for r in train + val}) == len(train) + len(val) == many + few
    for label, count in counts.items():
        held = sum(r.label == label for r in val)
        assert held == min(count - 1, max(1, round(frac * count)))


def test_a_share_that_cannot_be_held_out_is_refused(tmp_path):
    root = folders(tmp_path)
    for frac in (0.0, 1.0):
        with pytest.raises(DataError, match=rf"found val_frac={frac}; allowed: > 0 and < 1"):
            read_splits(root, frac, 0)
    with pytest.raises(DataError, match="one recording of each label"):
        read_splits(root, 0.5, 0)


def test_what_is_written_is_what_is_read(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {f"{split}{label}": rng.normal(size=(n, 3)) for n, split in ((4, "train"), (2, "val")) for label in "ab"}
    npy_sequences.write(tmp_path, ((name[:-1], name[-1], name, values) for name, values in arrays.items()))
    train, val = read_splits(tmp_path, None, 0)
    for recording in (*train, *val):
        np.testing.assert_array_equal(load(recording), arrays[recording.path.stem].astype(np.float32))


def test_statistics_are_those_of_all_steps(tmp_path):
    rng = np.random.default_rng(0)
    parts = [rng.normal(1000.0, 0.01, size=(n, 2)).astype(np.float32) * [1.0, 0.0] + [0.0, 7.3] for n in (1, 5, 30)]
    npy_sequences.write(tmp_path, [("train", "ab"[i % 2], str(i), part) for i, part in enumerate(parts)])
    npy_sequences.write(tmp_path, [("val", "a", "0", parts[0])])
    mean, scale = statistics(read_splits(tmp_path, None, 0)[0])
    together = np.concatenate(parts)
    np.testing.assert_allclose(mean, together.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(scale, [together[:, 0].std(), 1.0], rtol=0.02)  # float32 holds 1000 to 6e-5


def test_some_are_the_same_at_every_call(tmp_path):
    train = read_splits(folders(tmp_path), None, 0)[0] * 10
    assert some(train, None, 0) == some(train, 99, 0) == train
    assert some(train, 7, 0) == some(train, 7, 0)
    assert len(some(train, 7, 0)) == 7


def in_one_file(path: Path, arrays: Mapping[str, object]) -> Path:
    """Returns the path, now of an HDF5 file with the arrays at these places."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for place, values in arrays.items():
            file[place] = values
    return path


GOOD = {f"{split}/{label}/{split}{label}": rows for split in ("train", "test") for label, rows in OF_LABEL}


def test_one_file_gives_what_the_folders_give(tmp_path):
    file, other = in_one_file(tmp_path / "all.h5", {**GOOD, "notes": 1.0}), folders(tmp_path / "all")
    for inside, outside in zip(read_splits(file, None, 0), read_splits(other, None, 0), strict=True):
        assert [(r.label, load(r).tolist()) for r in inside] == [(r.label, load(r).tolist()) for r in outside]
    many = in_one_file(tmp_path / "many.h5", {f"train/{i % 2}/{i}": ONE for i in range(10)})
    assert [len(part) for part in read_splits(many, 0.2, 0)] == [8, 2]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"train": ONE}, r"all\.h5/train: found an array; allowed: .* /split/label/id.*try: docs/data\.md"),
        ({**GOOD, "train/a/more/b": ONE}, r"all\.h5/train/a/more/b: found an array; allowed: .*/split/label/id"),
        ({"a/train/1": ONE}, r"all\.h5: found arrays at a/train/1; allowed: .*/split/label/id"),
        ({}, r"all\.h5: found arrays at no place; allowed"),
        ({**GOOD, "test/b/x": ONE[0]}, r"test/b/x: found shape \(2,\); allowed: \(time, channel\)"),
        ({**GOOD, "test/b/x": "text"}, r"test/b/x: found numbers of type object; allowed: .*real numbers"),
        ({**GOOD, "test/b/x": [[1.0]]}, r"test/b/x: found 1 channels; allowed: 2, as .*all\.h5/train/a/traina has"),
    ],
)
def test_refuses_a_file_of_another_layout(tmp_path, arrays, message):
    file = in_one_file(tmp_path / "all.h5", arrays)
    with pytest.raises(DataError, match=message):
        read_splits(file, None, 0)


def test_refuses_what_is_no_file_of_hdf5(tmp_path, monkeypatch):
    file = tmp_path / "all.h5"
    file.write_bytes(b"no numbers")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(DataError, match=r"all\.h5: found .*h5py.*pip install 'cardtune\[signals\]'"):
        read_splits(file, None, 0)
    monkeypatch.undo()
    pytest.importorskip("h5py")
    with pytest.raises(DataError, match=r"all\.h5: found .*signature.*allowed: an HDF5 file.*try: docs/data\.md"):
        read_splits(file, None, 0)
    place = read_splits(in_one_file(file, GOOD), None, 0)[0][0]
    file.write_bytes(b"no numbers")
    h5_sequences.opened.cache_clear()
    with pytest.raises(DataError, match="signature"):
        load(place)


def test_a_fork_inherits_no_open_file(tmp_path):
    one = read_splits(in_one_file(tmp_path / "all.h5", GOOD), None, 0)[0][0]
    for _ in range(2):
        assert load(one).tolist() == ONE
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as other:
            assert other.submit(open_files, tmp_path).result() == []
            assert other.submit(load, one).result().tolist() == ONE
            assert len(other.submit(open_files, tmp_path).result()) == 1


def open_files(folder: Path) -> list[str]:
    """Returns the files below a folder that this process has open."""
    return [str(link.resolve()) for link in Path("/proc/self/fd").iterdir() if folder in link.resolve().parents]
