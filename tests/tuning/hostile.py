"""A run whose every text tries to be something else: markup, a script, an escape code, a formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tuning.journal.records import Record

TEXT = "=[/foo]<script>alert(1)</script>\x1b[2J\x07"


def run(records: Sequence[Record]) -> list[Record]:
    """Returns the records with `TEXT` wherever a stranger could have put it."""
    return [dataclasses.replace(r, fields=_poisoned(r.event, dict(r.fields))) for r in records]


def _poisoned(event: str, fields: dict[str, Any]) -> dict[str, Any]:
    if event == "study":
        fields |= {"id": TEXT, "workload": TEXT, "command": TEXT}
        fields |= {"device": {"name": TEXT}, "card": {"name": TEXT, "virtual": True, "cap_bytes": 2**30}}
        fields |= {"versions": {TEXT: TEXT}, "baselines": {TEXT: {"accuracy": 0.5}}}
    for key in ("message", "reason", "text", "rule"):
        if key in fields:
            fields[key] = TEXT
    if event in ("probe", "trial", "trial_start") and fields.get("name") is None:
        fields["config"] = {**fields["config"], "amp_dtype": TEXT}
    if event == "probe" and fields["name"] == "after":
        fields["name"] = TEXT
    return fields
