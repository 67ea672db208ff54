"""Readers of 300W-LP and BIWI on files written here in the published layouts, and on broken ones."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
from PIL import Image

from trainables.data import face_sets, faces_300w_lp
from trainables.data.errors import DataError
from trainables.data.faces import Face, pixels

RGB_CAL = """517.679 0 320
0 517.679 240.5
0 0 1

0 0 0 0

0.999947 0.00432361 0.00929419
-0.00446314 0.999877 0.0150443
-0.009228 -0.015085 0.999844

-24.0198 5.8896 -13.2308

640 480
"""


def box_of_points(left: float, top: float, right: float, bottom: float, count: int = 68) -> np.ndarray:
    """Returns landmarks (2, count) that reach from (left, top) to (right, bottom)."""
    rng = np.random.default_rng(0)
    points = rng.uniform(0.1, 0.9, (2, count))
    points[:, :2] = [[0.0, 1.0], [1.0, 0.0]]
    return points * [[right - left], [bottom - top]] + [[left], [top]]


def write_mat(path: Path, pose_deg: tuple[float, float, float], size: int = 450, **fields: Any) -> Path:
    """Writes NAME.jpg and NAME.mat as the authors of 300W-LP did: pitch, yaw, roll in radians, and more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    yaw, pitch, roll = np.radians(pose_deg)
    Image.new("RGB", (size, size), (90, 60, 30)).save(path.with_suffix(".jpg"))
    rest = {"roi": [[1, 2, 3, 4]], "Shape_Para": np.zeros((199, 1)), "Exp_Para": np.zeros((29, 1))}
    own = {"Pose_Para": np.array([[pitch, yaw, roll, 180.0, 200.0, -60.0, 0.0013]], np.float32)}
    own["pt2d"] = box_of_points(100, 120, 300, 320)
    chosen = {name: value for name, value in {**rest, **own, **fields}.items() if value is not None}
    scipy.io.savemat(path.with_suffix(".mat"), chosen)
    return path.with_suffix(".mat")


def about(axis: int, angle_deg: float) -> np.ndarray:
    """Returns the right-handed rotation (3, 3) about axis 0, 1 or 2."""
    c, s = math.cos(math.radians(angle_deg)), math.sin(math.radians(angle_deg))
    turn = np.eye(3)
    i, j = (axis + 1) % 3, (axis + 2) % 3
    turn[[i, i, j, j], [i, j, i, j]] = [c, -s, s, c]
    return turn


def write_biwi(root: Path, sequence: str, number: int, pose_deg: tuple[float, float, float]) -> Path:
    """Writes one frame of the database: the rotation, a blank line, the head's centre."""
    folder = root / "hpdb" / sequence
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rgb.cal").write_text(RGB_CAL)
    yaw, pitch, roll = pose_deg
    turn = about(0, -pitch) @ about(1, yaw) @ about(2, roll)
    rows = [" ".join(f"{v:g}" for v in row) + " \n" for row in turn.round(7)]
    path = folder / f"frame_{number:05d}_pose.txt"
    path.write_text("".join(rows) + "\n" + "65.1 30.2 884.5 \n")
    Image.new("RGB", (640, 480), (10, 200, 10)).save(folder / f"frame_{number:05d}_rgb.png", compress_level=1)
    return path


def test_300w_lp_radians_become_yaw_pitch_roll_in_degrees(tmp_path):
    write_mat(tmp_path / "300W_LP" / "AFW" / "AFW_134212_1_0", (-41.5, 12.25, 7.0))
    (face,) = face_sets.read(tmp_path / "300W_LP")
    assert face.angles_deg == pytest.approx((-41.5, 12.25, 7.0), abs=1e-4)
    assert face.image == tmp_path / "300W_LP" / "AFW" / "AFW_134212_1_0.jpg"
    assert face.group == "AFW/AFW_134212"


def test_300w_lp_box_has_hopenets_margins_and_is_square(tmp_path):
    k = 0.35
    write_mat(tmp_path / "A_0", (0, 0, 0), pt2d=box_of_points(100, 120, 300, 320))  # 200 x 200: the height decides
    write_mat(tmp_path / "B_0", (0, 0, 0), pt2d=box_of_points(10, 200, 310, 300))  # 300 x 100: the width does
    tall, wide = face_sets.read(tmp_path)
    top, bottom = 120 - 2 * k * 200, 320 + 0.6 * k * 200
    assert tall.box == (200 - 191, -20, 200 + 191, 362)
    assert (tall.box[1], tall.box[3]) == (round(top), round(bottom))
    assert (wide.box[0], wide.box[2]) == (round(10 - 0.6 * k * 300), round(310 + 0.6 * k * 300))
    assert wide.box[2] - wide.box[0] == wide.box[3] - wide.box[1]


@pytest.mark.parametrize(
    ("names", "group"),
    [
        (("AFW/AFW_134212_1_0", "AFW/AFW_134212_2_3", "AFW_Flip/AFW_134212_1_11"), "AFW/AFW_134212"),
        (("IBUG/IBUG_image_014_01_2", "IBUG/IBUG_image_014_02_0"), "IBUG/IBUG_image_014"),
        (("LFPW/LFPW_image_train_0001_0", "LFPW/LFPW_image_train_0001_15"), "LFPW/LFPW_image_train_0001"),
    ],
    ids=["AFW", "IBUG", "LFPW"],
)
def test_300w_lp_all_faces_of_a_photograph_are_one_group(tmp_path, names, group):
    for name in names:
        write_mat(tmp_path / name, (0, 0, 0))
    assert {f.group for f in face_sets.read(tmp_path)} == {group}


def test_300w_lp_leaves_out_landmarks_and_heads_beyond_99(tmp_path):
    write_mat(tmp_path / "AFW" / "AFW_1_1_0", (98.9, 0, 0))
    write_mat(tmp_path / "AFW" / "AFW_1_1_1", (-99.5, 0, 0))
    write_mat(tmp_path / "AFW" / "AFW_1_1_2", (0, 110, 0))
    for name in ("landmarks", "Code"):
        (tmp_path / name).mkdir()
        scipy.io.savemat(tmp_path / name / "AFW_1_1_0_pts.mat", {"pts_2d": np.zeros((68, 2))})
    assert [f.image.name for f in face_sets.read(tmp_path)] == ["AFW_1_1_0.jpg"]


@pytest.mark.parametrize("pose", [(40, -25, -30), (-60, 35, 20)], ids=str)
def test_biwi_angles_are_those_the_matrix_was_made_of(tmp_path, pose):
    write_biwi(tmp_path, "01", 3, pose)
    (face,) = face_sets.read(tmp_path)
    assert face.angles_deg == pytest.approx(pose, abs=1e-3)


def test_biwi_box_is_around_the_head_in_the_colour_image(tmp_path):
    write_biwi(tmp_path, "01", 3, (0, 0, 0))
    (face,) = face_sets.read(tmp_path)
    left, top, right, bottom = face.box
    # By hand: R c + t = (49.43, 49.10, 869.51) mm; u = 517.679 * x / z + 320, v = 517.679 * y / z + 240.5.
    assert (left + right) / 2 == pytest.approx(349.4, abs=1)
    assert (top + bottom) / 2 == pytest.approx(269.7, abs=1)
    assert right - left == bottom - top == round(517.679 * 250 / 869.51)


def test_biwi_sequences_of_one_person_are_one_group(tmp_path):
    for sequence in ("02", "03", "05", "07", "15", "18", "21", "22", "24"):
        write_biwi(tmp_path, sequence, 3, (0, 0, 0))
    groups = {f.image.parent.name: f.group for f in face_sets.read(tmp_path)}
    assert [groups[a] == groups[b] for a, b in (("03", "15"), ("05", "18"), ("02", "21"), ("07", "22"))] == [True] * 4
    assert len(set(groups.values())) == 5


def test_a_split_keeps_groups_and_depends_on_the_seed_alone():
    faces = [
        Face(Path(f"{g}_{i}.jpg"), (0, 0, 1, 1), (0.0, 0.0, 0.0), f"g{g}") for g in range(20) for i in range(1 + g % 3)
    ]
    train, val = face_sets.split(faces, 0.2, seed=0)
    assert sorted(map(id, train + val)) == sorted(map(id, faces))
    assert not {f.group for f in train} & {f.group for f in val}
    assert len({f.group for f in val}) == 4
    assert face_sets.split(faces, 0.2, seed=0) == (train, val) != face_sets.split(faces, 0.2, seed=1)
    assert len({f.group for f in face_sets.split(faces, 0.999, seed=0)[0]}) == 1
    with pytest.raises(DataError, match=r"found faces of g0 alone; .*val_data"):
        face_sets.split(faces[:1], 0.2, seed=0)


def test_pixels_scale_the_box_and_are_black_beyond_the_edge(tmp_path):
    image = Image.new("RGB", (40, 40), (200, 100, 50))
    image.save(tmp_path / "a.png")
    image.convert("L").save(tmp_path / "grey.png")
    whole = pixels(Face(tmp_path / "a.png", (0, 0, 40, 40), (0.0, 0.0, 0.0), ""), 8)
    assert (whole == [200, 100, 50]).all()
    half = pixels(Face(tmp_path / "a.png", (-40, 0, 40, 80), (0.0, 0.0, 0.0), ""), 8)
    assert (half[:3, 5:] == [200, 100, 50]).all()
    assert not half[:, :3].any()
    assert not half[5:].any()
    assert pixels(Face(tmp_path / "grey.png", (0, 0, 40, 40), (0.0, 0.0, 0.0), ""), 8).shape == (8, 8, 3)


MAT = b"MATLAB 7.3 MAT-file" + b" " * 105 + b"\x00\x02IM" + b"\x89HDF\r\n"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"Pose_Para": None}, r"Pose_Para: found no such field; allowed: .*\(1, 7\); try: docs"),
        ({"Pose_Para": np.zeros((1, 3))}, r"Pose_Para: found float64 of shape \(1, 3\); .* shape \(1, 7\)"),
        ({"Pose_Para": np.array([[np.nan] * 7])}, r"Pose_Para: found a value that is not finite"),
        ({"pt2d": np.full((2, 21), -1.0)}, r"pt2d: found float64 of shape \(2, 21\); .*\(2, 68\); try: docs/"),
        ({"pt2d": "sixty-eight"}, r"pt2d: found <U11 of shape \(1,\); allowed: numbers"),
        ({"pt2d": np.zeros((2, 68))}, r"landmarks: found a face 0 px wide at \(0, 0\); allowed: 1 to 20000 px"),
        (lambda whole: b"", r".*found .*; allowed: "),
        (lambda whole: whole[:140], r".*found .*; allowed: "),
        (lambda whole: whole[:-700], r".*found .*; allowed: "),
        (lambda whole: MAT, r"found NotImplementedError: .*-v7"),
    ],
    ids=["no pose", "short pose", "nan", "AFLW2000-3D", "text", "no face", "empty", "torn", "cut", "newer"],
)
def test_300w_lp_names_file_and_field(tmp_path, fields, message):
    path = write_mat(tmp_path / "A_0", (0, 0, 0), **({} if callable(fields) else fields))
    if callable(fields):
        path.write_bytes(fields(path.read_bytes()))
    with pytest.raises(DataError, match=r"A_0\.mat: " + message):
        face_sets.read(tmp_path)


@pytest.mark.parametrize("layout", ["300W-LP", "BIWI"])
def test_a_face_without_an_image_is_named(tmp_path, layout):
    if layout == "BIWI":
        image = write_biwi(tmp_path, "01", 3, (0, 0, 0)).with_name("frame_00003_rgb.png")
    else:
        image = write_mat(tmp_path / "A_0", (0, 0, 0)).with_suffix(".jpg")
    image.unlink()
    with pytest.raises(DataError, match=f"found no image beside it; allowed: one named {image.name}"):
        face_sets.read(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("pose", "1 0 0\n0 1 0\n", r"frame_00003_pose\.txt: found 6 numbers; allowed: 12"),
        ("pose", "1 0 0\n0 one 0\n0 0 1\n\n1 2 3\n", r"frame_00003_pose\.txt: found .*'one'"),
        ("pose", "1 0 0\n0 2 0\n0 0 1\n\n1 2 3\n", r"frame_00003_pose\.txt:1: rotation: found rows"),
        ("pose", "1 0 0\n0 1 0\n0 0 -1\n\n1 2 3\n", r"frame_00003_pose\.txt:1: rotation: found rows"),
        ("pose", "1 0 0\n0 1 0\n0 0 1\n\n1 2 -900\n", r"frame_00003_pose\.txt:5: centre: found .* behind the camera"),
        ("cal", RGB_CAL.replace("-24.0198 ", ""), r"rgb\.cal: found 26 numbers; allowed: 25 or 27, all finite"),
        ("cal", None, r"rgb\.cal: found .*No such file"),
    ],
)
def test_biwi_names_the_file_and_its_fault(tmp_path, name, text, message):
    pose = write_biwi(tmp_path, "01", 3, (0, 0, 0))
    broken = pose if name == "pose" else pose.with_name("rgb.cal")
    broken.unlink()
    if text is not None:
        broken.write_text(text)
    with pytest.raises(DataError, match=message):
        face_sets.read(tmp_path)


def test_a_folder_holds_one_set(tmp_path):
    with pytest.raises(DataError, match=r"missing: .*300W-LP or BIWI"):
        face_sets.read(tmp_path / "missing")
    with pytest.raises(DataError, match=r"allowed: NAME\.mat \(300W-LP\) or frame_"):
        face_sets.read(tmp_path)
    write_mat(tmp_path / "A_0", (0, 0, 0))
    write_biwi(tmp_path, "01", 3, (0, 0, 0))
    with pytest.raises(DataError, match=r"found A_0\.mat and frame_00003_pose\.txt"):
        face_sets.read(tmp_path)


@pytest.mark.parametrize("size", [0, 300])
def test_a_torn_image_is_named(tmp_path, size):
    write_mat(tmp_path / "A_0", (0, 0, 0))
    (face,) = face_sets.read(tmp_path)
    face.image.write_bytes(face.image.read_bytes()[:size])
    with pytest.raises(DataError, match=r"A_0\.jpg: found "):
        pixels(face, 8)


def test_a_large_set_is_read_again_only_if_a_file_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(face_sets, "INDEXED_FILES", 2)
    write_mat(tmp_path / "small" / "AFW_1_0.mat", (10.0, 0.0, 0.0))
    face_sets.read(tmp_path / "small")
    assert not (tmp_path / "cache").exists()
    for number in range(3):
        write_mat(tmp_path / "set" / f"AFW_{number}_0.mat", (10.0, 0.0, number))
    first = face_sets.read(tmp_path / "set")
    reads: list[int] = []
    real = faces_300w_lp.read
    monkeypatch.setattr(faces_300w_lp, "read", lambda mats: reads.append(len(mats)) or real(mats))
    assert face_sets.read(tmp_path / "set") == first
    assert not reads
    write_mat(tmp_path / "set" / "AFW_3_0.mat", (10.0, 0.0, 3.0))
    assert len(face_sets.read(tmp_path / "set")) == 4
    assert reads == [4]
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")  # where nothing can be kept
    assert len(face_sets.read(tmp_path / "set")) == 4
