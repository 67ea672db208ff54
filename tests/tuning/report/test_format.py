"""Figures as people write them."""

import pytest
from scipy import stats

from trainables.our_knobs import EVERY
from tuning.report import format as fmt
from tuning.stats import uncertainty

SHOWN = [
    *((fmt.duration, arguments, text) for arguments, text in [
        ((0.0,), "0.0s"), ((9.94,), "9.9s"), ((9.96,), "10s"), ((59.4,), "59s"), ((59.6,), "1m"), ((252,), "4m12s"),
        ((3600,), "1h00m"), ((0.05,), "50ms"), ((None,), "-"),
    ]),
    *((fmt.number, arguments, text) for arguments, text in [
        ((6.1e-4,), "6.1e-4"), ((1e-5,), "1e-5"), ((0.01,), "0.01"), ((0.0,), "0"), ((12345.0,), "12,345"),
        ((float("nan"),), "n/a"),
    ]),
    *((fmt.rate, arguments, text) for arguments, text in [
        ((61.23, 0.93), "61.2 ± 0.9"), ((412.3, 9.2), "412.3 ± 9.2"), ((412.3, 19), "412 ± 19"),
        ((3.3, 0.04), "3.30 ± 0.04"), ((1500.0,), "1,500"), ((None,), "-"),
    ]),
    *((fmt.percent, arguments, text) for arguments, text in [
        ((0.0,), "0 %"), ((0.004,), "0.4 %"), ((0.615,), "62 %"), ((1.0,), "100 %"), ((None,), "-"),
    ]),
    *((fmt.epochs, arguments, text) for arguments, text in [
        ((0.25,), "0.25 epochs"), ((1.004,), "1 epoch"), ((2.5,), "2.5 epochs"), ((120.0,), "120 epochs"),
    ]),
    *((fmt.size, arguments, text) for arguments, text in [
        ((50 * 2**20,), "50 MiB"), ((int(1.2 * 2**30),), "1.2 GiB"), ((None,), "-"),
    ]),
    *((fmt.plural, arguments, text) for arguments, text in [
        ((1, "seed"), "1 seed"), ((0, "seed"), "0 seeds"), ((2000, "pass", "passes"), "2,000 passes"),
    ]),
    *((fmt.plain, arguments, text) for arguments, text in [
        (("a\nb\x1b[2J\u202e",), "a\\nb\\x1b[2J\\u202e"), ((True,), "true"), ((None,), "null"), ((5e-4,), "5e-4"),
    ]),
    *((fmt.difference, arguments, text) for arguments, text in [
        ((0.0188, 0.0029), "+0.019 ± 0.003"), ((0.0,), "+0.000"), ((-0.00012,), "-0.000120"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("shown", "arguments", "text"), SHOWN)
def test_a_figure_is_written_so(shown, arguments, text):
    assert shown(*arguments) == text


@pytest.mark.parametrize(
    ("values", "text"), [([0.9], "0.900"), ([0.9, 0.5], "0.700 (0.500 and 0.900)"), ([0.5, 0.6, 0.7], "0.600 (")]
)
def test_a_range_needs_three_seeds(values, text):
    found = uncertainty.quality(dict(enumerate(values)), proportion_of=300)
    assert fmt.quality(found).startswith(text)
    assert (" to " in fmt.quality(found)) == (len(values) > 2)


def test_knobs_without_effect_are_no_difference():
    assert fmt.differing({"num_workers": 0, "prefetch_factor": 4}, {"prefetch_factor": 2}, EVERY) == {}
    assert fmt.differing({"num_workers": 2}, {}, EVERY) == {"num_workers": 2}, "what then has effect is at its default"
    assert fmt.differing(both := {"num_workers": 2, "prefetch_factor": 4}, {}, EVERY) == both


@pytest.mark.parametrize(("batch", "micro"), [(32, 8), (16, 8), (16, 4)])
def test_a_batch_that_is_cut_says_so_even_by_default(batch, micro):
    assert f"micro_batch_size={micro}" in fmt.settings({"batch_size": batch, "micro_batch_size": micro}, EVERY)
    assert fmt.settings({"batch_size": 8, "micro_batch_size": 8}, EVERY) == ["batch_size=8"]


def test_beside_before_only_what_changes_is_to_be_set():
    config = {"num_workers": 0, "learning_rate": 5e-4, "batch_size": 64, "micro_batch_size": 64}
    assert fmt.settings(config, EVERY) == ["batch_size=64", "micro_batch_size=64"]
    before = {"learning_rate": 1e-3, "num_workers": 2, "batch_size": 64, "micro_batch_size": 64}
    assert fmt.settings(config, EVERY, before) == ["learning_rate=5e-4 (was 1e-3)", "num_workers=0 (was 2)"]
    assert fmt.settings(before, EVERY, before) == []


def test_a_speed_is_the_mean_with_the_interval_of_that_mean():
    windows = (10.0, 10.0, 10.0, 10.0, 20.0)
    half = stats.t.ppf(0.975, 4) * stats.sem(windows)
    assert fmt.speed(uncertainty.throughput(windows)) == f"12.0 ± {half:.1f}", "and not around the median of 10"
    assert fmt.speed(uncertainty.throughput([10.0])) == "10.0"
    assert fmt.speed(uncertainty.throughput([10.0, 20.0])) == "15.0"
    assert fmt.speed(None, 10.0) == "10.0 (probed)"


@pytest.mark.parametrize("pairs", [[(2.0, 1.0), (8.0, 1.0)], [(4.0, 1.0)] * 3])
def test_an_interval_of_two_or_of_nothing_is_not_shown(pairs):
    gain = uncertainty.gain("a", "b", [uncertainty.Pair(*pair) for pair in pairs])
    assert gain.low is not None
    assert fmt.ratio(gain, "x") == "4.00x"
