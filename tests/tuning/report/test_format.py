"""Figures as people write them."""

import io
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console
from scipy import stats

from tests.tuning.report.test_report import bare
from trainables import Knob
from trainables.knobs import KnobTable
from trainables.our_knobs import EVERY
from tuning.config.schema import PLAIN
from tuning.report import format as fmt
from tuning.report import report, sentences, tables
from tuning.report.summary import Place, Summary
from tuning.report.text import summary as printed
from tuning.stats import uncertainty
from tuning.stats.uncertainty import Gain


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0s"),
        (9.94, "9.9s"),
        (9.96, "10s"),
        (59.4, "59s"),
        (59.6, "1m"),
        (252, "4m12s"),
        (3600, "1h00m"),
        (None, "-"),
    ],
)
def test_duration(seconds, text):
    assert fmt.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(6.1e-4, "6.1e-4"), (1e-5, "1e-5"), (0.01, "0.01"), (0.0, "0"), (12345.0, "12,345"), (float("nan"), "n/a")],
)
def test_number(value, text):
    assert fmt.number(value) == text


@pytest.mark.parametrize(
    ("value", "half_width", "text"),
    [(61.23, 0.93, "61.2 ± 0.9"), (412.3, 9.2, "412.3 ± 9.2"), (412.3, 19, "412 ± 19"), (3.3, 0.04, "3.30 ± 0.04"),
     (1500.0, None, "1,500"), (None, None, "-")],
)  # fmt: skip
def test_rate(value, half_width, text):
    assert fmt.rate(value, half_width) == text


@pytest.mark.parametrize(
    ("values", "text"), [([0.9], "0.900"), ([0.9, 0.5], "0.700 (0.500 and 0.900)"), ([0.5, 0.6, 0.7], "0.600 (")]
)
def test_two_seeds_are_shown_as_they_are(values: list[float], text: str) -> None:
    found = uncertainty.quality(dict(enumerate(values)))
    assert fmt.quality(found).startswith(text)
    assert (" to " in fmt.quality(found)) == (len(values) > 2)


@pytest.mark.parametrize(
    ("frac", "text"), [(0.0, "0 %"), (0.004, "0.4 %"), (0.615, "62 %"), (1.0, "100 %"), (None, "-")]
)
def test_percent(frac, text):
    assert fmt.percent(frac) == text


def test_passes():
    assert [fmt.passes(n) for n in (0.25, 1.0, 1.004, 2.5, 120.0)] == [
        "0.25 passes",
        "1 pass",
        "1 pass",
        "2.5 passes",
        "120 passes",
    ]


def test_size():
    assert (fmt.size(50 * 2**20), fmt.size(int(1.2 * 2**30)), fmt.size(None)) == ("50 MiB", "1.2 GiB", "-")


@pytest.mark.parametrize(
    ("gain", "text"),
    [
        (Gain("best", "before", 1.84, 1.79, 1.89, 5), "1.84 times as fast as before (1.79 to 1.89)"),
        (Gain("best", "after", 0.5, 0.4, 0.625, 5), "2.00 times slower than after (1.60 to 2.50)"),
        (
            Gain("best", "after", 1.01, 0.97, 1.05, 5),
            "not clearly faster or slower than after (1.01 times, 0.97 to 1.05)",
        ),
        (
            Gain("best", "after", 1.5, None, None, 0, "short probes"),
            "1.50 times as fast as after (from short probes, not side by side: no interval)",
        ),
        (Gain("best", "after", 1.5, None, None, 1), "1.50 times as fast as after (from one round: no interval)"),
        (
            Gain("best", "before", 2.58, 0.61, 10.89, 2),
            "not clearly faster or slower than before (2.58 times, from 2 rounds)",
        ),
        (Gain("best", "before", 2.02, 1.73, 2.36, 2), "2.02 times as fast as before (from 2 rounds)"),
        (Gain("best", "before", 0.5, 0.4, 0.625, 2), "2.00 times slower than before (from 2 rounds)"),
    ],
)
def test_a_gain_in_words(gain, text):
    assert sentences.gain_sentence(gain) == text


def test_knobs_without_effect_are_no_difference():
    assert fmt.differing({"num_workers": 0, "prefetch_factor": 4}, {"prefetch_factor": 2}, EVERY) == {}
    assert fmt.differing({"num_workers": 2}, {}, EVERY) == {"num_workers": 2}, "what then has effect is at its default"
    assert fmt.differing(both := {"num_workers": 2, "prefetch_factor": 4}, {}, EVERY) == both


@pytest.mark.parametrize(("batch", "micro"), [(32, 8), (16, 8), (16, 4)])
def test_a_batch_that_is_cut_says_so_even_by_default(batch, micro):
    told = fmt.settings({"batch_size": batch, "micro_batch_size": micro}, EVERY)
    assert f"micro_batch_size={micro}" in told
    assert fmt.settings({"batch_size": 8, "micro_batch_size": 8}, EVERY) == ["batch_size=8"]


def test_a_text_is_one_line_without_control_characters():
    assert fmt.plain("a\nb\x1b[2J\u202e") == "a\\nb\\x1b[2J\\u202e"
    assert (fmt.plain(True), fmt.plain(None), fmt.plain(5e-4)) == ("true", "null", "5e-4")


@pytest.mark.parametrize(
    ("card", "virtual", "cap_bytes", "text"),
    [
        ("cpu", False, None, "Measured on Example CPU, 2 cores."),
        ("cpu", False, 2**31, "Measured on Example CPU, 2 cores; memory was held to 2.0 GiB."),
        ("rtx3090", False, 2**34, "Measured on Example CPU, 2 cores."),
        (
            "t4",
            True,
            2**34,
            "Throughput is that of Example CPU, 2 cores, not of card t4, which was emulated; "
            "memory was held to its 16.0 GiB.",
        ),
    ],
)
def test_only_a_card_that_is_not_here_was_emulated(card, virtual, cap_bytes, text):
    place = Place(device="Example CPU", cores=2, threads=2, card=card, virtual=virtual, cap_bytes=cap_bytes)
    assert sentences.place_sentence(place) == text


@pytest.mark.parametrize(
    ("mode", "baseline", "text"),
    [
        ("max", 0.5, ""),
        ("max", 0.88, "by so few validation samples, accuracy may be no better than the baseline copying (0.880)"),
        ("max", 0.9, "the next run's accuracy may be no better than the baseline copying (0.900)"),
        ("max", 0.95, "accuracy 0.906 is no better than the baseline copying (0.950); speed is worth little"),
        ("min", 0.95, ""),
        ("min", 0.91, "the next run's accuracy may be no better than the baseline copying (0.910)"),
        ("min", 0.9, "accuracy 0.906 is no better than the baseline copying (0.900); speed is worth little"),
    ],
)
def test_a_best_that_learned_no_more_than_a_baseline_is_said(
    found: Summary, mode: str, baseline: float, text: str
) -> None:
    worse = {"max": 0.4, "min": 0.99}[mode]
    baselines = {"majority": {"accuracy": worse}, "copying": {"accuracy": baseline}}
    own = replace(found, objectives={"accuracy": mode}, baselines=baselines)
    said = sentences.baseline_sentence(own)
    assert said.startswith(text)
    assert bool(said) == bool(text)
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(*printed(own))
    assert said[1:] in " ".join(captured.get().split())


def test_no_baseline_or_no_best_says_nothing(found: Summary) -> None:
    assert sentences.baseline_sentence(replace(found, baselines={})) == ""
    assert sentences.baseline_sentence(replace(found, named={})) == ""


def test_a_speed_is_the_mean_with_the_interval_of_that_mean() -> None:
    windows = (10.0, 10.0, 10.0, 10.0, 20.0)
    found = uncertainty.throughput(windows)
    assert found is not None
    half = stats.t.ppf(0.975, 4) * stats.sem(windows)
    assert fmt.speed(found) == f"12.0 ± {half:.1f}"  # around the mean of 12, and not around the median of 10
    assert fmt.speed(uncertainty.throughput([10.0])) == "10.0"
    assert fmt.speed(None, 10.0) == "10.0 (probed)"


def test_the_range_of_the_next_run_needs_several_seeds(found: Summary) -> None:
    several = uncertainty.quality({1: 0.90, 2: 0.92}, proportion_of=300)
    one = uncertainty.quality({1: 0.90}, proportion_of=300)
    assert fmt.quality(several).startswith("0.910 (0.")
    assert fmt.quality(one) == "0.900"  # the binomial interval of its samples says nothing of another run
    best = found.named["best"]
    alone = replace(found, named={**found.named, "best": replace(best, quality={"accuracy": one})})
    assert "next run" not in report.render(bare(alone)).split("<h2>")[0]


def test_a_speed_of_trainings_is_marked_beside_speeds_of_windows(found: Summary) -> None:
    assert found.best is not None
    trained = uncertainty.throughput([39_203.0])
    other = replace(found.best, name="t003", trial="", trained=trained, throughput=None)
    grid = tables.answers(replace(found, confirmed=(found.best, other)))
    assert grid is not None
    fast = {row[0]: row[1] for row in grid.rows}
    assert (fast["best t007"], fast["t003"]) == ("61.3 ± 0.7", "39,203 (trained)")
    second = replace(found, named={**found.named, "best": replace(found.best, throughput=None, trained=trained)})
    assert ["samples/s", "61.3 ± 0.7", "39,203 (trained)"] in tables.compared(found, second).rows


def test_the_answer_is_by_the_knobs_of_its_own_run_whichever_are_in_use(found: Summary) -> None:
    best = replace(found.named["best"], config={"channels": 32})
    defaults = replace(found.named["before"], name=PLAIN, config={})
    rows = KnobTable({"channels": Knob(16, "both", values=(16, 32))})
    own = replace(found, table=rows, named={**found.named, "best": best, PLAIN: defaults})
    assert "Set channels=32" in sentences.answer(own)


@pytest.mark.parametrize(("rung", "short"), [(0.60, True), (0.88, False)])
def test_trainings_that_learn_most_at_their_end_are_called_too_short(found: Summary, rung: float, short: bool) -> None:
    own = replace(found, curves={t.trial: ((600, rung), (1200, 0.9)) for t in found.trials})
    assert found.baseline is not None
    assert any("too short to compare" in said for said in sentences.cautions(own)) == short


def test_what_to_set_is_all_that_differs_from_the_default_or_from_what_there_is() -> None:
    config = {"learning_rate": 5e-4, "batch_size": 64, "micro_batch_size": 64, "num_workers": 0}
    assert fmt.settings(config, EVERY) == ["batch_size=64", "micro_batch_size=64"]
    before = {"learning_rate": 1e-3, "num_workers": 2, "batch_size": 64, "micro_batch_size": 64}
    changed = set(fmt.settings(config, EVERY, before)) - set(fmt.settings(config, EVERY))
    assert changed == {"num_workers=0", "learning_rate=5e-4"}


@pytest.mark.parametrize("width", [60, 79, 80, 81, 100])
def test_a_table_in_a_narrow_terminal_loses_no_letter(width):
    head = ("", "samples/s", "best over it", "by its model", "accuracy", "peak")
    rows = [
        ("best t008", "92 ± 31", "-", "-", "0.899", "132 MiB"),
        ("plain defaults", "84.9 ± 3.7", "1.08x (0.73 to 1.59)", "1.00x", "not trained", "-"),
        ("fastest t000", "109.3 (probed)", "-", "-", "0.879", "161 MiB"),
    ]
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(fmt.table(head, rows))
    said = captured.get()
    assert all(len(line) <= width for line in said.splitlines())
    wanted = Counter("".join(cell for row in [head, *rows] for cell in row).replace(" ", ""))
    assert wanted <= Counter(said)


@pytest.mark.parametrize(("pairs", "said"), [([(2.0, 1.0), (8.0, 1.0)], "4.00x"), ([(4.0, 1.0)] * 3, "4.00x")])
def test_an_interval_of_two_or_of_nothing_is_not_shown(pairs, said):
    gain = uncertainty.gain("a", "b", pairs)
    assert gain.low is not None
    assert fmt.ratio(gain, "x") == said
    assert fmt.speed(uncertainty.throughput([10.0, 20.0])) == "15.0"
    assert "±" in fmt.speed(uncertainty.throughput([10.0, 20.0, 30.0]))
