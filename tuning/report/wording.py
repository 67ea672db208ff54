"""Figures and findings in words, for terminal and report alike: GiB, minutes, percent, and their sentences.

Returns plain text; whoever prints it escapes it for their medium.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainables.knobs import Knobs, is_active
from tuning.config.cards import HERE
from tuning.journal.timeline import Times
from tuning.report.summary import Claim, Named, Place, Summary
from tuning.search.bottleneck import Verdict
from tuning.stats.uncertainty import Gain, Quality

GIB_BYTES = 2**30
MIB_BYTES = 2**20

OUTCOME_WORDS = {
    "ok": "ok",
    "stopped": "stopped",
    "oom": "oom",
    "host_oom": "host oom",
    "shm": "out of shared memory",
    "fd": "out of file descriptors",
    "no_result": "without a result",
    "crash": "crashed",
    "timeout": "timed out",
    "data": "data error",
}

MASK = "***"
# "max_tokens" is no secret and "hf_token" is one: the word must end the name or stand before a separator.
_SECRET = re.compile(r"tokens?($|[_.-])|secret|password|key$", re.IGNORECASE)
_ASSIGNED = re.compile(r"(?P<name>[\w.-]+)=(?P<value>\S+)")
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def plain(value: object) -> str:
    """Returns `value` as one line of text without control characters; those become their escapes, such as `\\x1b`."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, float):
        return number(value)
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))


def number(value: float, digits: int = 3) -> str:
    """Returns a number in at most `digits` significant digits, as one would type it: 0.0006 is 6e-4."""
    if not math.isfinite(value):
        return "n/a"
    if value and abs(value) < 1e-2:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"


def rate(value: float | None, half_width: float | None = None) -> str:
    """Returns samples a second with their spread, "61.2 ± 0.9"; decimals follow the spread's first digit."""
    if value is None:
        return "-"
    if half_width is None:
        return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"
    decimals = 0 if half_width >= 10 else 1 if half_width >= 0.1 or value >= 100 else 2
    return f"{value:,.{decimals}f} ± {half_width:,.{decimals}f}"


def named_rate(named: Named) -> str:
    """Returns a configuration's samples a second: of whole trainings, else of windows, else of its probe, said so."""
    found = named.trained or named.throughput
    if found is not None:
        return rate(found.median, found.half_width)
    return f"{rate(named.probed_samples_per_s)} (probed)" if named.probed_samples_per_s else "-"


def window_rate(named: Named) -> str:
    """Returns a configuration's samples a second in the windows that it shares with others, or in its probe."""
    if named.throughput is not None:
        return rate(named.throughput.median, named.throughput.half_width)
    return f"{rate(named.probed_samples_per_s)} (probed)" if named.probed_samples_per_s else "-"


def ratio(gain: Gain, sign: str = "") -> str:
    """Returns a gain with its interval, "1.84 (1.79 to 1.89)"."""
    if gain.low is None or gain.high is None:
        return f"{gain.ratio:.2f}{sign}"
    return f"{gain.ratio:.2f}{sign} ({gain.low:.2f} to {gain.high:.2f})"


def gain_sentence(gain: Gain) -> str:
    """Returns what a gain means: faster, slower, or no difference that the windows can tell."""
    if not gain.is_told:
        return f"as fast as {gain.over}, as far as the windows tell: {ratio(gain)} times"
    grounds = "" if gain.rounds else " (from probes, not side by side)"
    if gain.ratio >= 1:
        return f"{ratio(gain)} times faster than {gain.over}{grounds}"
    return f"{ratio(gain.inverse())} times slower than {gain.over}{grounds}"


def claim_sentence(claim: Claim | None, measured: Gain | None) -> str:
    """Returns "after was claimed 4.0x before; measured 1.52x (1.50 to 1.54) here", or "" where nothing was claimed."""
    if claim is None or claim.ratio is None:
        return ""
    here = f"{ratio(measured, 'x')} here" if measured else "not measured here"
    return f"after over before: claimed {claim.ratio:.1f}x, measured {here}"


def bound(found: Verdict) -> str:
    """Returns what holds a configuration back in a few words, "loader 31 % (bad)"."""
    return f"{found.bound} {percent(found.share)} ({found.band})"


def verdict_sentence(found: Verdict) -> str:
    """Returns what holds a configuration back; where it holds back much, also what may help, tried or not."""
    if not found.held:
        return found.sentence
    if found.remedies:
        return f"{found.sentence}; not tried: {', '.join(found.remedies[:3])}"
    return f"{found.sentence}; tried already: {', '.join(found.tried[:3])}" if found.tried else found.sentence


def quality(found: Quality) -> str:
    """Returns a quality with where the next run is expected, "0.906 (0.893 .. 0.919)"."""
    if found.low is None or found.high is None:
        return f"{found.mean:.3f}"
    return f"{found.mean:.3f} ({found.low:.3f} .. {found.high:.3f})"


def baseline_sentence(summary: Summary) -> str:
    """Returns that the best is, or the next run may be, no better than a baseline of the workload; else ""."""
    best, baseline, objective = summary.best, summary.baseline, summary.objective
    found = best.quality.get(objective) if best else None
    if found is None or baseline is None:
        return ""
    sign = 1.0 if summary.objectives[objective] == "min" else -1.0
    beside = f"no better than the baseline {plain(baseline.name)} ({baseline.value:.3f})"
    if sign * found.mean >= sign * baseline.value:
        remedy = "speed is worth little before more is learned: budget.train_epochs, or wider learning knobs"
        return f"{plain(objective)} {found.mean:.3f} is {beside}; {remedy}"
    worst = found.high if sign > 0 else found.low
    if worst is not None and sign * worst >= sign * baseline.value:
        return f"the next run's {plain(objective)} may be {beside}"
    return ""


def size(bytes_count: float | None) -> str:
    """Returns bytes as GiB, or as MiB below a tenth of one, and so on to KiB."""
    if bytes_count is None:
        return "-"
    if bytes_count < GIB_BYTES / 10:
        return f"{bytes_count / MIB_BYTES:.0f} MiB" if bytes_count >= MIB_BYTES else f"{bytes_count / 1024:.0f} KiB"
    return f"{bytes_count / GIB_BYTES:.1f} GiB"


def duration(seconds: float | None) -> str:
    """Returns seconds as people say them: 17ms, 0.9s, 58s, 4m, 4m12s, 1h02m."""
    if seconds is None:
        return "-"
    if 0 < seconds < 0.095:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m" + (f"{whole % 60:02d}s" if whole % 60 else "")
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def percent(frac: float | None) -> str:
    """Returns a fraction as whole percent, with "<1 %" for what is not nothing."""
    if frac is None:
        return "-"
    return "<1 %" if 0 < frac < 0.005 else f"{frac * 100:.0f} %"


def counts(found: Mapping[str, int], *, always: tuple[str, ...] = ("ok", "stopped", "oom", "refused", "lost")) -> str:
    """Returns "12: 5 ok, 4 stopped, ..."; outcomes that did not happen are left out unless in `always`."""
    order = [*(k for k in always if k != "lost"), *sorted(k for k in found if k not in always)]
    order += ["lost"] if "lost" in always else []
    parts = [f"{found.get(k, 0)} {OUTCOME_WORDS.get(k, plain(k))}" for k in order if k in always or found[k]]
    return f"{sum(found.values())}: " + ", ".join(parts)


def shares(times: Times) -> list[tuple[str, float]]:
    """Returns the activities with their seconds, the longest first; what took no time is left out."""
    parts = [
        ("training", times.training_s),
        ("evaluating", times.evaluating_s),
        ("probing", times.probing_s),
        ("confirming", times.confirming_s),
        ("start-up", times.startup_s),
        ("waiting", times.waiting_s),
    ]
    return sorted(((name, s) for name, s in parts if s > 0), key=lambda part: -part[1])


def place_sentence(place: Place) -> str:
    """Returns what it ran on, and whose throughput it is where the card was emulated."""
    cores = f", {place.cores} cores" if place.cores else ""
    threads = f", {place.threads} threads" if place.threads and place.threads != place.cores else ""
    device = f"{plain(place.device)}{cores}{threads}"
    if is_held(place):
        return f"Measured on {device}; memory was held to {size(place.cap_bytes)}."
    if not place.virtual or place.card in HERE:
        return f"Measured on {device}."
    cap = f"; memory was held to its {size(place.cap_bytes)}" if place.cap_bytes else ""
    return f"Throughput is that of {device}, not of card {plain(place.card)}, which was emulated{cap}."


def is_held(place: Place) -> bool:
    """Returns whether this machine's own device was held to less memory than it has."""
    return place.card in HERE and place.cap_bytes is not None


def complete(config: Mapping[str, object]) -> dict[str, object]:
    """Returns every knob of a configuration with the defaults filled in, less those without effect in it."""
    try:
        full: dict[str, object] = dict(Knobs.of(config).as_dict())
    except ValueError:  # a run of another version: what it recorded is all there is to say
        full = dict(config)
    return {name: value for name, value in full.items() if is_active(name, full)}


def differing(config: Mapping[str, object], other: Mapping[str, object] | None) -> dict[str, object]:
    """Returns the knobs of `config` that are otherwise in `other`, defaults filled in; all without an `other`."""
    if other is None:
        return dict(config)
    ours, theirs = complete(config), complete(other)
    return {name: value for name, value in ours.items() if name not in theirs or theirs[name] != value}


def knobs(config: Mapping[str, object]) -> list[str]:
    """Returns "name=value" for each knob."""
    return [f"{plain(name)}={plain(value)}" for name, value in config.items()]


def rival(found: Mapping[str, Any]) -> str:
    """Returns what was decided about a rival of the pick, and the probability that it changes it."""
    odds, needs = percent(found.get("chance")), duration(found.get("expected_s"))
    if found.get("decision") == "confirm":
        return f"may change the pick ({odds}): trained again, about {needs}"
    if found.get("decision") == "too long":
        left = duration(max(0.0, found.get("left_s") or 0.0))
        return f"may change the pick ({odds}), but needs {needs}, and {left} are left"
    return "can change the pick no more: no further seed"


def next_commands(summary: Summary, folder: Path) -> list[str]:
    """Returns the commands that are of use next, to be pasted into a shell; `folder` is the run's."""
    if summary.best is None:
        return [resume_command(folder)]
    runs_dir = _runs_dir(folder)
    named = [summary.id, *(["--runs-dir", runs_dir] if runs_dir else [])]
    rest = (["train", "--from", str(folder / "best.yaml")], ["show", *named], ["report", *named])
    return [shlex.join(["python", "-m", "tuning", *words]) for words in rest]


def resume_command(folder: Path) -> str:
    """Returns the command that goes on with the run in `folder`, to be pasted into a shell."""
    runs_dir = _runs_dir(folder)
    elsewhere = [f"runs_dir={runs_dir}"] if runs_dir else []
    return shlex.join(["python", "-m", "tuning.run", f"resume={folder.name}", *elsewhere])


def shell_words(command: str) -> list[str]:
    """Returns the words of a command as they are quoted in it, so that it can be broken between them."""
    return [shlex.quote(word) for word in shlex.split(command)]


def _runs_dir(folder: Path) -> str:
    """Returns where the run's folder is looked for, "" where that is the default."""
    runs_dir = folder.parent.parent
    return "" if runs_dir == Path("runs") else str(runs_dir)


def too_little_time(limit_s: float, *, passed_s: float, probing_s: float, confirming_s: float, trials: int) -> str:
    """Returns what to say where start-up, probes and confirming alone take longer than search.max_time, else "".

    `trials` are searched whatever the limit is.
    """
    least_s = passed_s + probing_s + confirming_s
    if limit_s >= least_s:
        return ""
    parts = [f"start-up ({duration(passed_s)})", f"probes ({duration(probing_s)})" if probing_s else ""]
    before = ", ".join(part for part in parts if part)
    return (
        f"search.max_time={duration(limit_s)} is too short: {before} and confirming (about {duration(confirming_s)}) "
        f"alone take {duration(least_s)}, and {trials} trial{'s are' if trials > 1 else ' is'} searched whatever the "
        f"limit; give it search.max_time={math.ceil(2 * least_s / 60)}m, or lower "
        f"{'budget.probe.max_time_s and ' if probing_s else ''}budget.confirm.windows"
    )


def is_secret(name: str) -> bool:
    """Returns whether an option of this name holds what must not be passed on."""
    return _SECRET.search(name) is not None


def shareable(text: str) -> str:
    """Returns `text` without secrets given as name=value, without users in URLs, and with the home folder as ~."""
    home = home_folder()
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?=/|\s|$)", "~", text)
    text = _ASSIGNED.sub(lambda m: f"{m['name']}={MASK}" if is_secret(m["name"]) else m[0], text)
    return _USER_IN_URL.sub(MASK, text)


def home_folder() -> str:
    """Returns the user's home folder, "" where there is none."""
    try:
        return str(Path.home())
    except RuntimeError:  # no HOME, and no entry for the user
        return ""
