"""What a site's reply says of its rows, in words: for its operator's screen, and for its audit log."""

from collections.abc import Mapping, Sequence
from typing import Any

Fields = dict[str, Any]

SHOWN = 12  # names that a line lists, unless all are asked for
# Who replies, how its tensors lie, and what opens masks, of which the hash of a message is kept.
FORMS = {"client", "kinfed", "upload", "client_statistics", "keys", "boxes", "shares"}


def keep_for_log(fields: Fields) -> Fields:
    """The fields of a reply that an audit log keeps: all, except the form of its tensors and what opens masks."""
    parts = fields.get("bundle")
    if isinstance(parts, dict):
        return {"clients": {name: keep_for_log(part) for name, part in parts.items() if isinstance(part, dict)}}
    return {name: value for name, value in fields.items() if name not in FORMS}


def describe_reply(fields: Fields, sizes: Mapping[str, int], most: int | None = SHOWN) -> str:
    """What a site's reply says of its rows, in a line; empty if nothing. `most` names are listed, None: all.

    `sizes` are how many numbers each of its tensors has.
    """
    if isinstance(clients := fields.get("clients"), dict):
        return ". ".join(
            f"{name}: {line}" for name, reply in clients.items() if (line := describe_reply(reply, {}, most))
        )
    lines = []
    if "rows" in fields:
        lines.append(f"description of {fields['rows']:,} training rows: {describe_columns(fields, most)}")
    if "size" in fields:
        counted = f", which count as {fields['weight']:,g}" if "weight" in fields else ""
        lines.append(f"that it has {fields['size']:,} training rows{counted}")
    if "scores" in fields:
        lines.append(f"scores of round {fields['evaluated'] + 1}: {_scores(fields['scores'])}")
    if "privacy" in fields:
        spent = fields["privacy"]
        lines.append(f"epsilon {spent['spent']:.3g} of {spent['budget']:g} is spent")
    if "baselines" in fields:
        scores = [f"{name} {test:.4g}" for name, (_, test) in fields["baselines"].items() if test is not None]
        lines.append(f"test scores of what it can do without others: {', '.join(scores) or 'none'}")
    if sizes:
        round = f" of round {fields['round'] + 1}" if "round" in fields else ""
        lines.append(f"{_some([f'{name} ({size:,} numbers)' for name, size in sizes.items()], most)}{round}")
    return "; ".join(lines)


def describe_columns(fields: Fields, most: int | None) -> str:
    """A description's columns, each with what is said of it."""
    columns = [f"{name}: {describe_column(column, most)}" for name, column in fields.get("statistics", {}).items()]
    if "begins" in fields:
        columns.append("at which steps windows begin")
    columns += [f"the target: {describe_column(column, most)}" for column in fields.get("answers", [])]
    return ". ".join(columns)


def describe_column(column: Mapping[str, Any], most: int | None = SHOWN) -> str:
    """What is said of one column."""
    if column["kind"] == "category":
        names = [f"{name} ({count})" for name, count in column["counts"].items()]
        text = f"{len(names):,} categories by name and count: {_some(names, most)}" if names else "no category's name"
        others = f"; {column['others']:,} rows of others" if column["others"] else ""
        return f"{text}{others}; {column['missing']:,} missing"
    if column["kind"] == "date":
        years = describe_column({"kind": "number", **column["years"]}, most)
        return f"years ({years}), and whether dates have a time of day"
    if not column["present"]:
        return f"nothing but that {column['missing']:,} are missing"
    near = f", counts around {len(column['near'])} values" if column["near"] else ""
    return f"count {column['present']:,}, mean {column['mean']:.4g}, deviation {column['deviation']:.4g}{near}"


def _scores(rows: Sequence[Sequence[Any]]) -> str:
    """Scores by split and model."""
    by: dict[str, list[str]] = {}
    for model, split, metric, value in rows:
        by.setdefault(f"{split} ({model})", []).append(f"{metric} {value:.4g}")
    return ", ".join(f"{name} {' '.join(values)}" for name, values in by.items())


def _some(names: Sequence[str], most: int | None) -> str:
    more = 0 if most is None else max(0, len(names) - most)
    return ", ".join(names[:most]) + (f" and {more:,} more" if more else "")
