"""Nothing of the future reaches a feature, whatever the frames; frames, labels and splits are what they say."""

from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainables.data.bar_windows import BarWindows, decisions, parts, scaled, split_at, windows
from trainables.data.errors import DataError
from trainables.data.timeframes import HOUR_US, Bars, Timeframe, answers, features, parse, resample, volatility

START_US = 1_704_067_200_000_000  # Monday, 1 January 2024
FRAMES = parse("1h:5 4h:4 1D:2")


def walk(count: int, seed: int = 0, step_us: int = HOUR_US, gap: float = 0.1) -> Bars:
    """Returns bars of a random walk; a share `gap` of the times have none."""
    random = np.random.default_rng(seed)
    steps = np.cumsum(1 + (random.random(count) < gap) * random.integers(1, 60, count))
    close = 100.0 * np.exp(np.cumsum(0.01 * random.standard_normal(count)))
    opened = close * np.exp(0.002 * random.standard_normal(count))
    high, low = np.maximum(opened, close) * 1.001, np.minimum(opened, close) * 0.999
    volume = random.integers(0, 1000, count).astype(float)
    return Bars(START_US + steps * step_us, np.stack([opened, high, low, close, volume], axis=1))


def utc(*when: int) -> int:
    return int(datetime(*when, tzinfo=UTC).timestamp()) * 1_000_000  # type: ignore[misc, arg-type]


@pytest.mark.parametrize(
    ("frame", "close", "end"),
    [
        ("15min:1", (2024, 1, 3, 10, 1), (2024, 1, 3, 10, 15)),
        ("1h:1", (2024, 1, 3, 10), (2024, 1, 3, 10)),
        ("4h:1", (2024, 1, 3, 10), (2024, 1, 3, 12)),
        ("1D:1", (2024, 1, 3, 0, 1), (2024, 1, 4)),
        ("1W:1", (2024, 1, 3), (2024, 1, 8)),
        ("1W:1", (2024, 1, 8), (2024, 1, 8)),
        ("1M:1", (2024, 2, 1), (2024, 2, 1)),
        ("1M:1", (2024, 2, 1, 0, 1), (2024, 3, 1)),
        ("3M:1", (2024, 2, 1), (2024, 4, 1)),
        ("1M:1", (1969, 12, 31), (1970, 1, 1)),
    ],
)
def test_a_bar_ends_where_the_calendar_says(frame, close, end):
    assert parse(frame)[0].end_us(np.array([utc(*close)])).tolist() == [utc(*end)]


def test_timeframes_are_read_in_any_order():
    assert parse("1D:2, 4h:4  1h:5") == FRAMES == (Timeframe(1, "h", 5), Timeframe(4, "h", 4), Timeframe(1, "D", 2))
    assert [frame.name for frame in FRAMES] == ["1h", "4h", "1D"]


@pytest.mark.parametrize("text", ["1h", "1h:0", "", "24h:3 1D:3"])
def test_timeframes_are_refused_by_item(text):
    with pytest.raises(ValueError, match=f"'{text}'"):
        parse(text)


@pytest.mark.parametrize("frame", ["90min:1", "1W:1", "1M:1"])
def test_resampling_equals_going_through_the_bars_one_by_one(frame):
    bars, longer = walk(2000), parse(frame)[0]
    wanted: dict[int, list[float]] = {}
    for close_us, (opened, high, low, close, volume) in zip(bars.close_us, bars.values, strict=True):
        end = int(longer.end_us(np.array([close_us]))[0])
        bar = wanted.setdefault(end, [opened, high, low, close, 0.0])
        bar[1:] = [max(bar[1], high), min(bar[2], low), close, bar[4] + volume]
    wanted = {end: bar for end, bar in wanted.items() if end <= bars.close_us[-1]}
    found = resample(bars, longer)
    assert found.close_us.tolist() == list(wanted)
    assert found.values == pytest.approx(np.array(list(wanted.values())))


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    frames=st.sampled_from(["1h:5 4h:4 1D:2", "2h:3 6h:2", "1h:4 1W:1", "1D:3 1M:1", "90min:4 5h:2"]),
    step=st.sampled_from([HOUR_US, HOUR_US // 2, HOUR_US + 60_000_000, 50 * 60_000_000]),
    label=st.sampled_from(["volatility", "direction"]),
    at=st.floats(0.0, 1.0),
)
def test_bars_that_close_later_change_no_feature_of_a_decision(seed, frames, step, label, at):
    chosen = parse(frames)
    bars = walk(1500, seed, step_us=step)

    def looks(of: Bars) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
        framed = [resample(of, frame) for frame in chosen]
        made = decisions(chosen, framed, label, 3)  # type: ignore[arg-type]
        seen = [windows(features(b), e, f.window) for b, e, f in zip(framed, made.ends, chosen, strict=True)]
        return made.decided_us, seen, made.last_labels

    decided, seen, last = looks(bars)
    assert len(decided) > 20
    index = int(at * (len(decided) - 1))
    later = bars.close_us > decided[index]
    other = walk(1500, seed + 1).values * 3.0
    changed = Bars(bars.close_us, np.where(later[:, None], other, bars.values))
    decided_then, seen_then, last_then = looks(changed)
    assert decided_then.tolist() == decided.tolist()
    for before, after in zip(seen, seen_then, strict=True):
        assert np.array_equal(before[: index + 1], after[: index + 1])
    assert last[: index + 1].tolist() == last_then[: index + 1].tolist()


def test_a_window_ends_with_the_bar_that_has_just_closed():
    bars = walk(400, gap=0.0)
    framed = [resample(bars, frame) for frame in FRAMES]
    made = decisions(FRAMES, framed, "volatility", 3)
    for frame, longer, ends in zip(FRAMES, framed, made.ends, strict=True):
        newest = longer.close_us[1:][ends - 1]
        assert (newest <= made.decided_us).all()
        assert (made.decided_us - newest < frame.length_us).all()


def test_volatility_and_labels_by_hand():
    bars = walk(60)
    returns = [0.0, *np.diff(np.log(bars.values[:, 3]))]
    spread = volatility(bars, 4)
    assert np.isnan(spread[:4]).all()
    assert spread[30] == pytest.approx(np.std(returns[27:31], ddof=1))
    up, higher = answers(bars, "volatility", 4), answers(bars, "direction", 4)
    assert up[30] == float(np.std(returns[31:35], ddof=1) > np.std(returns[27:31], ddof=1))
    assert higher[30] == float(bars.values[34, 3] > bars.values[30, 3])
    assert np.isnan(up[-4:]).all()
    assert np.isnan(higher[-4:]).all()
    assert np.isnan(answers(walk(3), "volatility", 4)).all()


def test_features_by_hand():
    bars = Bars(np.array([0, 1]), np.array([[1.0, 2.0, 1.0, 2.0, 9.0], [2.0, 8.0, 2.0, 4.0, np.e - 1.0]]))
    assert features(bars) == pytest.approx(np.array([[np.log(2), np.log(4), np.log(2), 1.0]]))


@pytest.mark.parametrize(("val_frac", "horizon"), [(0.1, 12), (0.3, 1), (0.5, 5)])
def test_no_training_label_reaches_the_validation_part(val_frac, horizon):
    series = {"a": walk(1500, 1), "b": walk(1200, 2, step_us=2 * HOUR_US)}
    frames = parse("2h:5 1D:2")
    made = [decisions(frames, [resample(b, f) for f in frames], "direction", horizon) for b in series.values()]
    train, val = parts(series, frames, "direction", horizon, val_frac)
    cut_us = split_at(made, val_frac)
    assert val.decided_us.min() == cut_us
    purged = sum(len(d.decided_us) for d in made) - len(train.labels) - len(val.labels)
    assert purged in range(horizon - 1, len(made) * horizon + 1)  # a series may end before the cut
    assert len(val.labels) / (purged + len(train.labels) + len(val.labels)) == pytest.approx(val_frac, abs=0.01)


def test_bars_after_the_split_change_no_training_window():
    bars, other = walk(1500, 1), walk(1500, 2).values * 5.0
    made = decisions(FRAMES, [resample(bars, f) for f in FRAMES], "volatility", 12)
    later = bars.close_us > split_at([made], 0.3)
    changed = Bars(bars.close_us, np.where(later[:, None], other, bars.values))
    before, after = (parts({"a": b}, FRAMES, "volatility", 12, 0.3)[0] for b in (bars, changed))
    assert len(before.labels) > 300
    assert np.array_equal(before.windows, after.windows)
    assert before.labels.tolist() == after.labels.tolist()


def test_the_scale_is_that_of_training_bars():
    bars = walk(600)
    values = features(bars)
    found = scaled(values, bars.close_us[1:], int(bars.close_us[400]))
    assert found[:400].mean(axis=0) == pytest.approx(np.zeros(4), abs=1e-5)
    assert found[:400].std(axis=0) == pytest.approx(np.ones(4), abs=1e-5)
    other = values.copy()
    other[400:] *= 7.0
    assert np.array_equal(scaled(other, bars.close_us[1:], int(bars.close_us[400]))[:400], found[:400])
    constant = scaled(np.full((5, 1), 3.0), np.arange(5), 4)
    assert constant.tolist() == [[0.0]] * 5


def test_parts_hold_every_series_and_refuse_one_too_short():
    train, val = parts({"a": walk(900, 1), "b": walk(900, 2)}, FRAMES, "volatility", 3, 0.3)
    for part in (train, val):
        assert isinstance(part, BarWindows)
        assert part.windows.shape == (len(part.labels), 5 + 4 + 2, 4)
        assert part.windows.dtype == np.float32
        assert np.isfinite(part.windows).all()
        assert set(part.labels.tolist()) == set(part.last_labels.tolist()) == {0, 1}
    with pytest.raises(DataError, match=r"b: found 20 bars, .*\(6 of 1h, 5 of 4h, 3 of 1D\)"):
        parts({"a": walk(900, 1), "b": walk(20, 2)}, FRAMES, "volatility", 3, 0.3)
    with pytest.raises(DataError, match="a: found 5 bars"):
        parts({"a": walk(5)}, FRAMES, "volatility", 3, 0.3)
