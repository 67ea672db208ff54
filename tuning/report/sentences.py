"""Findings as sentences, the answer first; and the commands that are of use next. Plain text, for every medium."""

from __future__ import annotations

import collections
import math
import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainables.hook import HOOKED
from trainables.knob_columns import word
from trainables.knobs import OF_THE_LOOP
from tuning.config.cards import HERE
from tuning.config.choices import BEFORE, PLAIN
from tuning.config.lenient import finite
from tuning.config.schema import StudyConfig
from tuning.config.shareable import shareable
from tuning.journal.events import Config, NodeRecord, ProbeRecord
from tuning.journal.timeline import STARTUP
from tuning.memory.oom import Outcome
from tuning.report import format as fmt
from tuning.report.answers import BesideToday
from tuning.report.format import duration, percent, plain, plural, ratio, size
from tuning.report.named import Named
from tuning.report.summary import Place, Summary
from tuning.report.trial_views import TrialView
from tuning.report.words import outcome
from tuning.search.bottleneck import Verdict
from tuning.search.race import SYSTEM
from tuning.search.rule import Rule
from tuning.stats.uncertainty import Gain, Quality


def left_out(config: StudyConfig) -> list[str]:
    """Returns what of the space and of the named configurations is left out, and what else was changed."""
    parts = [text.partition(" is left out: ") for text in config.dropped]
    keys = dict.fromkeys(key.partition("=")[0].removeprefix("knobs.") for key, left, _ in parts if left)
    others = [text for text, left, _ in parts if not left]
    return [f"left out here: {', '.join(keys)}; -v lists why"] * bool(keys) + others


SEARCHED = (
    "Trials, by one seed. Speeds are what the search went by, mostly one short timing (a probe); gains, measured side "
    "by side, are in the table of answers. front: of the trials that came to their end, none is as good and faster."
)
OTHERS_FRAC = 0.1
"""The share of a probe's cores that others may take: 0.00 to 0.03 on two quiet ones, 0.32 to 0.44 beside one."""
FAILURES = 3
"""So many reasons of failures are told."""
SETTINGS = 4
"""So many are in the first sentence at the most."""
LONG_STARTUP = 0.2
"""The share of a run from which on its start-up is taken apart."""
LEAST_ALIKE = 3
"""So many trainings of exactly one quality are said to be suspicious."""


def answer(found: Summary) -> str:
    """Returns what the run found in one sentence: what to set, how much faster that trains, how good it is, how sure.

    Qualities in brackets are means on the same seeds, and their difference with half of its 95 % interval. If it is
    known, a second sentence says how soon it is as good as what is trained today.
    """
    best = found.best
    if best is None:
        return "No configuration was picked: the run ended before its pick, or no trial reached its end."
    if best.samples_per_s is None and not best.quality and not found.trials_done:
        return "No answer yet: nothing was measured in the time. Go on with a larger search.max_time."
    if keeps_today(found):
        said = _keep(found, best)
    else:
        figures = ", ".join(filter(None, [_speed(found, best), _learned(found, best)]))
        gain = found.answers["best"].gain
        is_open = gain is not None and gain.low is not None and not gain.is_told
        said = _to_set(found, best)
        said = f"Perhaps {said[0].lower()}{said[1:]}: {figures}." if is_open else f"{said}: {figures}.{_soon(found)}"
    said = f"The best so far, unconfirmed: {said[0].lower()}{said[1:]}" if found.provisional else said
    unlearned = baseline_sentence(found)
    return f"{unlearned} The fastest so far: {said[0].lower()}{said[1:]}" if unlearned else said


def _keep(found: Summary, best: Named) -> str:
    """Returns that the reference is the answer, which settings those are, and what they were compared with."""
    own = fmt.settings(best.config, found.table)
    name = "" if found.reference is None else found.reference.name
    kept = f"Keep {called(name)}" if name != BEFORE else "Keep your current settings"
    kept += f" ({_few(own)}, the rest at their defaults)" * bool(own and name != PLAIN)
    if found.trials and not best.quality and not found.trials_done:
        less = "budget.train_epochs=N for shorter trainings"
        return (
            f"No answer yet: {called(name)} did not come to the end of a training in the time, and nothing else was "
            f"trained. Give it a larger search.max_time, or {less}."
        )
    if not (count := found.trials_done):
        other = found.gain(SYSTEM, found.reference.name) if found.reference is not None else None
        why = "no other system knobs were faster" + ", and nothing else was trained" * bool(found.trials)
        if found.slowing is not None and SYSTEM in found.named:
            why = "other system knobs were faster in short timings alone, and trainings slow down"
        if other is not None:
            faster = _few(fmt.unlike(found.named[SYSTEM].config, best.config, found.table))
            why = f"with the fastest system knobs ({faster}) training is {gain_sentence(other)}"
        return f"{kept}: {why}."
    for_quality = found.study.setting("pick", "goal") == "quality"
    better = "better at no less speed" if for_quality else f"faster at the same {plain(found.objective)}"
    fresh = len(paired := [one for one in found.confirmed if one.config != best.config])
    if paired and not any(_seeds_in_common(found, one) for one in paired):
        others = "the one other trial" if count == 1 else f"any of {count} other trials"
        return f"{kept}: no time was left to train {others} and the reference on the same fresh seed."
    if count == 1:
        again = ", trained again on fresh seeds," * (fresh > 0)
        return f"{kept}: the one other trial{again} was not shown to be {better}."
    again = f" ({fresh} of them trained again on fresh seeds)" * (fresh > 0)
    return f"{kept}: none of {count} other trials{again} was shown to be {better}."


def _seeds_in_common(found: Summary, one: Named) -> int:
    """Returns on how many fresh seeds a configuration and the reference were trained."""
    if found.reference is None or found.study.setting("pick", "at_least") is not None:
        return 1
    both = (of.quality.get(found.objective) for of in (one, found.reference))
    own, today = ({} if q is None or not q.confirmed else q.by_seed for q in both)
    return len(own.keys() & today.keys())


def _few(settings: Sequence[str]) -> str:
    """Returns the first of many settings, and how many more there are."""
    kept = settings if len(settings) <= SETTINGS else [*settings[: SETTINGS - 1]]
    more = f" and {len(settings) - len(kept)} more" if len(kept) < len(settings) else ""
    return ", ".join(kept) + more


def _to_set(found: Summary, best: Named) -> str:
    """Returns what is to be set, in a few words; the settings in full are told elsewhere."""
    base = today(found)
    chosen = [
        one.partition(" (was ")[0] for one in fmt.settings(best.config, found.table, base.config if base else None)
    ]
    rest = ""
    if base is not None and not _apart(found, best, base):
        rest = ", and leave the rest as it is" if base.name == BEFORE else f", the rest as in {called(base.name)}"
    return f"Set {_few(chosen)}{rest}" if chosen else "Leave every knob at its default"


def today(found: Summary) -> Named | None:
    """Returns the configuration that the settings are told as changes of: the user's own, else the reference."""
    return found.named.get(BEFORE, found.reference)


def _apart(found: Summary, one: Named, other: Named) -> list[str]:
    """Returns the knobs in which two configurations differ, without system knobs."""
    return [n for n in fmt.apart(one.config, other.config, found.table) if n not in found.table.system]


def _speed(found: Summary, best: Named) -> str:
    gain = found.answers["best"].gain
    if gain is None and best.samples_per_s is None:
        return "its speed was not measured"
    if gain is None:
        return f"this trains {fmt.speed(best.speed, best.probed_samples_per_s)} samples a second"
    said = gain_sentence(gain)
    return f"this {'is' if said.startswith('not') else 'trains'} {said}"


def _learned(found: Summary, best: Named) -> str:
    """Returns how good the pick is beside the reference."""
    reference, objective, own = found.reference, plain(found.objective), found.answers["best"].quality
    if found.objective not in best.quality:
        if reference is not None and not _apart(found, best, reference):
            return "only system knobs differ"
        return f"its {objective} was not measured" if objective else ""
    quality = best.quality[found.objective]
    seeds = _seeds(found, quality, own)
    if own is None or reference is None:
        return f"with {objective} {quality.mean:.3f} ({seeds})"
    larger = f"{fmt.difference(own.difference, own.half_width)} " if own.seeds else ""
    both = f"{own.own:.3f} beside {own.reference:.3f} of {called(reference.name)}"
    verdict = own.verdict if _apart(found, best, reference) else "same"  # system knobs change nothing that is learned
    if verdict == "unknown":
        return f"with {objective} {both} ({larger}{seeds})"
    told = {"same": "at the same", "better": "with better", "worse": "but with worse"}
    why = ", only system knobs differ" if not _apart(found, best, reference) else ""
    return f"{told[verdict]} {objective} ({both}: {larger}{seeds}{why})"


def _soon(found: Summary) -> str:
    """Returns how long the pick trains, and how soon it is as good as the reference at its end; "" if not known."""
    time, reference = found.answers["best"].time, found.reference
    if time is None or reference is None or time.reference.median_s is None:
        return ""
    theirs = duration(time.reference.median_s)
    name, pick, samples = called(reference.name), found.named["best"], found.horizon_samples
    whole = ""
    if samples and pick.samples_per_s and reference.samples_per_s:
        took = [duration(samples / one.samples_per_s) for one in (pick, reference) if one.samples_per_s]
        length = f" of {fmt.epochs(samples / found.study.train_samples)}" if found.study.train_samples else ""
        whole = f" A training{length} takes {took[0]} instead of {took[1]}."
    missed, seeds = time.own.missed, len(time.own.by_seed)
    if time.own.median_s is None:
        return (
            f"{whole} It did not reach the final {plain(found.objective)} of {name}, which takes {theirs} with these."
        )
    own = duration(time.own.median_s)
    soon = f"first reached after {own} instead of {theirs}"
    if own == theirs or time.own.median_s > time.reference.median_s:
        soon = f"reached no sooner: after {own}" + f", with {name} after {theirs}" * (own != theirs)
    but = f" (on {missed} of {plural(seeds, 'seed')} it never is)" if missed else ""
    return f"{whole} The final {plain(found.objective)} of {name} is {soon}{but}."


def _seeds(found: Summary, best: Quality, own: BesideToday | None) -> str:
    """Returns by how many seeds a quality is known."""
    if own is not None and own.is_fresh:
        both = " that both have" * (own.seeds < len(best.by_seed))
        return f"on {plural(own.seeds, 'seed')}{both}" if own.seeds else "on different seeds"
    if not best.confirmed:
        return "by one seed" + ", unconfirmed" * (not found.provisional)
    return f"on {plural(len(best.by_seed), 'seed')}" if own is None else "on different seeds"


def cautions(found: Summary) -> list[str]:
    """Returns what speaks against taking the answer as it is, a sentence each, without a full stop."""
    told = (sentence(found) for sentence in (same_sentence, slowing_sentence))
    return [said[0].upper() + said[1:] for said in told if said]


def measured_sentence(found: Summary) -> str:
    """Returns what the figures of the answers rest on, "" if nothing was measured beside the reference."""
    own, objective = list(found.answers.values()), plain(found.objective)
    told = [a.gain for a in own if a.gain and fmt.has_interval(a.gain)]
    gain = max(told, key=lambda g: g.trainings + g.rounds, default=None)
    shown = [a for a in own if a.name != "best" or not keeps_today(found)]
    seeds = max((a.quality.seeds for a in shown if a.quality and a.quality.half_width is not None), default=0)
    ground = f"ratio in {fmt.beside(gain)} (95 % interval)" if gain else ""
    parts = [f"speed: {ground}; samples/s: that ratio times the reference's"] if gain else []
    reach = "±: 95 % interval, from the spread between seeds in this run"
    on = f"mean difference on the same {seeds} seeds" if seeds > 1 else "difference on the same seed"
    same = f"{objective}: {on} ({reach})"
    parts += [same] * (seeds > 0)
    timed = [a.time for a in shown if a.time and a.time.own.median_s is not None]
    over = ", median over seeds (fastest to slowest)" * any(len(time.own.by_seed) > 1 for time in timed)
    of = called(found.reference.name) if found.reference is not None else ""
    parts += [f"time: until the final {objective} of {of} is reached{over}"] * bool(timed)
    is_short = any("short timing" in gain.grounds for gain in found.gains)
    parts += ["short timing: one of a few seconds, not alternating with others"] * is_short
    return "; ".join(parts)


def failed(views: Sequence[TrialView]) -> list[str]:
    """Returns of what trials or probes failed, the most frequent reasons first; what did not fit is no failure."""
    usual = {Outcome.OK, Outcome.STOPPED, Outcome.CUT, Outcome.REFUSED, Outcome.OOM, Outcome.HOST_OOM}
    told = collections.Counter((one.outcome, one.message) for one in views if one.message and one.outcome not in usual)
    return [f"{count} {outcome(kind)}: {plain(why)}" for (kind, why), count in told.most_common(FAILURES)]


def same_sentence(found: Summary) -> str:
    """Returns that all trials and trainings came to the same quality, as where nothing is learned; else "".

    Stopped trials count by their last rung: a task that every training solves has some that lag behind.
    """
    values = [t.values.get(found.objective) for t in found.trials if t.outcome == "ok"]
    again = [own for one in found.confirmed if (own := one.quality.get(found.objective))]
    values += [value for own in again for value in own.by_seed.values()]
    known = [value for value in values if value is not None]
    on_the_way = {value for curve in found.curves.values() for _, value in curve}
    if len(known) < LEAST_ALIKE or len({*known, *on_the_way}) > 1:
        return ""
    told = f"{plain(found.objective)} {known[0]:.3f}"
    baseline = found.baseline
    rule = Rule(found.objective, found.objectives[found.objective])
    if baseline is not None and rule.is_better(known[0], baseline.value):
        return f"all {len(known)} trainings reached {told}: by quality none can be told from another"
    return f"all {len(known)} trainings came to {told}: nothing may be learned yet; budget.train_epochs=N trains longer"


def unfinished_sentence(found: Summary) -> str:
    """Returns that the run is not finished, "" if it is or nothing is known yet."""
    if found.best is None or found.is_finished:
        return ""
    asked = "" if found.trials_asked is None else f" of {found.trials_asked}"
    return f"The run is not finished: {found.trials_done}{asked} trials have ended so far"


def kinds(found: Mapping[str, str]) -> list[str]:
    """Returns a sentence for each system knob that changes what is learned, by the reason that was found."""
    so = "so that speed alone does not choose it"
    return [f"{plain(knob)} changes what is learned here, {so}: {plain(why)}" for knob, why in found.items()]


def train_command(found: Summary, name: str) -> str:
    """Returns the command that trains a named configuration, to be typed where the study was started.

    Relative paths in options, and a workload that is a module, are found from there alone.
    """
    folder, file = _recorded_folder(found), file_of(name)
    out = "" if name == "best" else f" --out {_quoted(folder / f'train-{Path(file).stem}')}"  # of each one of its own
    return f"python -m tuning train --from {_quoted(folder / file)}{out}"


def command_with(found: Summary, config: Config) -> str:
    """Returns the command that a run is about, to be typed with the knobs of a configuration; "" if it is about none.

    `{folder}` stays, in words: whoever types it chooses one.
    """
    today = finite(found.study.setting("workload", "epochs")) or 1.0
    given = {"seed": found.study.seed, "epochs": math.ceil(today), "folder": "FOLDER", **found.table.whole(config)}
    return plain(shlex.join(word.format(**given) for word in found.study.program))


def beside_command(found: Summary, config: Config) -> list[str]:
    """Returns what the command does not say of a configuration, as it was set from outside, and where to write it."""
    said, table = " ".join(found.study.program), found.table
    own = [n for n, v in config.items() if n in HOOKED and f"{{{n}}}" not in said and v != table.defaults[n]]
    own = [name for name in own if table.is_active(name, config)]
    return [f"{name}={word(config[name])}: {OF_THE_LOOP[name].by_hand}" for name in own]


def _quoted(path: Path) -> str:
    """Returns a path for a shell, with the home folder as ~, which has to stand before the quotes."""
    said = shareable(str(path))
    return f"~/{shlex.quote(said[2:])}" if said.startswith("~/") else shlex.quote(said)


def keeps_today(found: Summary) -> bool:
    """Returns whether the pick is what is trained today."""
    return found.best is not None and found.reference is not None and not _differs(found, found.reference.name)


def _differs(found: Summary, name: str) -> bool:
    """Returns whether the pick is another configuration than the one of that name."""
    return found.best is not None and bool(fmt.apart(found.best.config, found.named[name].config, found.table))


def _recorded_folder(found: Summary) -> Path:
    """Returns the run's folder, from where the study was started."""
    workload = found.study.setting("workload", "name") or Path(found.workload).stem
    return Path(plain(found.study.setting("runs_dir") or "runs"), plain(workload), plain(found.id))


def disturbed(probes: Sequence[ProbeRecord]) -> str:
    """Returns that other programs took part of the processor while probes were timed, "" where that was little."""
    timed = [probe for probe in probes if probe.samples_per_s]
    taken = [share for probe in timed if (share := probe.others_cpu_frac) is not None]
    disturbed = [share for share in taken if share >= OTHERS_FRAC]
    if not disturbed:
        return ""
    took = f"other programs used {percent(statistics.median(disturbed))} of the CPU"
    said = f"{took} during {len(disturbed)} of {len(timed)} probes, whose speeds are too low"
    return f"{said}. Gains from alternating timings hold; on an idle machine the search may find more"


def called(name: str) -> str:
    """Returns a named configuration as sentences speak of it."""
    return f"the {PLAIN}" if name == PLAIN else fmt.spoken(name)


def found_by(found: Summary, best: Named) -> str:
    """Returns where the pick comes from, in a few words."""
    if best.trial:
        trained = next((t.config for t in found.trials if t.trial == best.trial), best.config)
        unlike = ", ".join(fmt.unlike(best.config, trained, found.table))
        return f"trial {plain(best.trial)}" + f" with {unlike}, as in the reference" * bool(unlike)
    return "the fastest system knobs" if SYSTEM in best.labels else "from short timings, not trained"


def gain_sentence(gain: Gain) -> str:
    """Returns what a gain means, such as "2.80 times as fast as before (95 % interval 2.51 to 3.12)"."""
    over, shown = called(gain.over), ratio(gain)
    times, _, interval = shown.partition(" ")
    ground = f"by {gain.grounds or fmt.beside(gain)}"
    ground = f"95 % interval {interval.strip('()')}" if interval else ground
    if gain.low is not None and not gain.is_told:
        unsure = f"not clearly faster or slower than {over} ({times} times as fast, {ground})"
        return unsure if interval else f"{times} times as fast as {over} {ground}, too few to tell"
    return f"{times} times as fast as {over} ({ground})"


def baseline_sentence(found: Summary) -> str:
    """Returns that the best is no better than a baseline of the workload, with what to do; else ""."""
    best, baseline, objective = found.best, found.baseline, found.objective
    own = best.quality.get(objective) if best else None
    sign = 1.0 if found.objectives.get(objective) == "min" else -1.0
    if own is None or baseline is None or sign * own.mean < sign * baseline.value:
        return ""
    said = f"{plain(objective)} {own.mean:.3f} is no better than the baseline {plain(baseline.name)}"
    more = "train longer, budget.train_epochs=N, or search more learning rates"
    return f"Not of use yet: {said} ({baseline.value:.3f}); {more}."


def slowing_sentence(found: Summary) -> str:
    """Returns that trainings slow down on their way, so that probes flatter them; else ""."""
    if (own := found.slowing) is None:
        return ""
    first, then = fmt.rate(own.before_per_s), fmt.rate(own.after_per_s)
    return (
        f"trainings slow down: {plain(own.trial)} trained on {first} samples a second up to sample {own.samples:,} and "
        f"on {then} after it; probes time the beginning alone"
    )


def quality_sentence(found: Summary, own: Quality) -> str:
    """Returns a quality of the pick, and where one more training is expected to come out, if several seeds tell."""
    if not own.confirmed:
        return f"{own.mean:.3f}, by one seed, in the search itself"
    if found.sets_its_seed:
        return f"{own.mean:.3f}, by one seed, which train(run) sets itself"
    if (count := len(own.by_seed)) < 3 or own.low is None or own.high is None:
        values = " and ".join(f"{value:.3f}" for value in sorted(own.by_seed.values()))
        return f"{own.mean:.3f}" + f", the mean of two seeds: {values}" * (count > 1) + ", by one seed" * (count == 1)
    reach = f"{own.low:.3f} to {own.high:.3f} (95 %)"
    several = f"{own.mean:.3f}, the mean of {count} seeds; one more training is expected within {reach}"
    return f"{own.mean:.3f} on each of {count} seeds" if own.low == own.high else several


def bound(found: Verdict) -> str:
    """Returns what holds a configuration back in a few words, "loader 31 %"."""
    return f"{found.bound} {percent(found.share)}"


def verdict_sentence(found: Verdict) -> str:
    """Returns what holds a configuration back, and what may help that was not tried, if it holds back much."""
    if not (found.held and found.remedies):
        return found.sentence
    return f"{found.sentence}; not tried, might help: {', '.join(found.remedies[:3])}"


def place_sentence(place: Place) -> str:
    """Returns what it ran on, and whose throughput it is where the card was emulated."""
    cores = f", {place.cores} cores" if place.cores else ""
    threads = f", {place.threads} threads" if place.threads and place.threads != place.cores else ""
    kind = f", kind {plain(place.target)} of the cluster" if place.target else ""
    together = f", {place.devices_per_trial} processes a trial" if place.devices_per_trial > 1 else ""
    device = f"{plain(place.device)}{cores}{threads}{kind}{together}"
    if is_held(place):
        return f"Measured on {device}; memory was held to {size(place.cap_bytes)}."
    if not place.virtual:
        return f"Measured on {device}."
    cap = f"; memory was held to its {size(place.cap_bytes)}" if place.cap_bytes else ""
    return f"Throughput is that of {device}, not of card {plain(place.card)}, which was emulated{cap}."


def is_held(place: Place) -> bool:
    """Returns whether this machine's own device was held to less memory than it has."""
    return place.card in HERE and place.cap_bytes is not None


def node(checked: NodeRecord) -> str:
    """Returns that trials run on a node of a cluster, or why none do."""
    if checked.why:
        return f"{checked.node} is left out: {checked.why}"
    return f"{checked.node} runs trials: it is of kind {checked.kind}"


def startup(found: Summary) -> str:
    """Returns what start-up took and its parts if that is a large share of the run, else ""."""
    startup_s, parts = found.times.stages.get(STARTUP, 0.0), found.study.startup_parts
    if not parts or startup_s < LONG_STARTUP * found.times.wall_s:
        return ""
    return f"; start-up {duration(startup_s)}, of which " + ", ".join(f"{n} {duration(s)}" for n, s in parts.items())


def next_commands(found: Summary, folder: Path) -> list[str]:
    """Returns the commands that are of use next, to be pasted into a shell; `folder` is the run's."""
    if found.best is None:
        return [resume_command(folder)]
    runs_dir = _runs_dir(folder)
    named = [found.id, *(["--runs-dir", runs_dir] if runs_dir else [])]
    first = [resume_command(folder)] if found.provisional else []
    again = [["report", *named]] if found.provisional else []  # which writes best.yaml where it is not there yet
    is_new = not found.given() or any(_differs(found, one.name) for one in found.given())
    ablate = [["ablate", *named]] if is_new and not found.ablation else []
    trained = ["train", "--from", str(folder / "best.yaml"), *_as_long_as_today(found)]
    rest = (*again, trained, *ablate, ["show", *named])
    return [*first, *(shlex.join(["python", "-m", "tuning", *words]) for words in rest)]


def _as_long_as_today(found: Summary) -> list[str]:
    """Returns the option that trains for as long as EPOCHS of the workload's file says, where trials were shorter."""
    today, one_pass = finite(found.study.setting("workload", "epochs")) or 0.0, found.study.train_samples
    return ["--epochs", f"{today:g}"] if round(today * one_pass) > (found.horizon_samples or one_pass) else []


def file_of(name: str) -> str:
    """Returns the name of the file that a named configuration is exported to."""
    return f"{re.sub('[^A-Za-z0-9_-]', '_', name)}.yaml"


def resume_command(folder: Path) -> str:
    """Returns the command that goes on with the run in `folder`, to be pasted into a shell."""
    runs_dir = _runs_dir(folder)
    elsewhere = [f"runs_dir={runs_dir}"] if runs_dir else []
    return shlex.join(["python", "-m", "tuning.run", f"resume={folder.name}", *elsewhere])


def _runs_dir(folder: Path) -> str:
    """Returns where the run's folder is looked for, "" where that is the default."""
    runs_dir = folder.parent.parent
    return "" if runs_dir == Path("runs") else str(runs_dir)
