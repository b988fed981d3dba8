"""What a site's reply says of its rows, in words: for its operator's screen, and for its audit log."""

from collections.abc import Mapping, Sequence
from typing import Any

Words = dict[str, Any]

SHOWN = 12  # names that a line lists, unless all are asked for
FORMS = {"client", "kinfed", "upload", "client_statistics"}  # who replies, and how its tensors lie


def kept(words: Words) -> Words:
    """The words of a reply that an audit log keeps: all, except the form of its tensors."""
    parts = words.get("bundle")
    if isinstance(parts, dict):
        return {"clients": {name: kept(one) for name, one in parts.items() if isinstance(one, dict)}}
    return {name: value for name, value in words.items() if name not in FORMS}


def told(words: Words, sizes: Mapping[str, int], most: int | None = SHOWN) -> str:
    """What a site's reply says of its rows, in a line; empty if nothing. `most` names are listed, None: all.

    `sizes` are how many numbers each of its tensors has.
    """
    if isinstance(clients := words.get("clients"), dict):
        return ". ".join(f"{name}: {line}" for name, one in clients.items() if (line := told(one, {}, most)))
    lines = [f"description of {words['rows']:,} training rows: {described(words, most)}"] if "rows" in words else []
    if "size" in words:
        lines.append(f"that it has {words['size']:,} training rows")
    if "scores" in words:
        lines.append(f"scores of round {words['evaluated'] + 1}: {_scores(words['scores'])}")
    if "baselines" in words:
        each = [f"{name} {test:.4g}" for name, (_, test) in words["baselines"].items() if test is not None]
        lines.append(f"test scores of what it can do without others: {', '.join(each) or 'none'}")
    if sizes:
        round = f" of round {words['round'] + 1}" * ("round" in words)
        lines.append(f"{_some([f'{name} ({size:,} numbers)' for name, size in sizes.items()], most)}{round}")
    return "; ".join(lines)


def described(words: Words, most: int | None = SHOWN) -> str:
    """A description's columns, each with what is said of it."""
    columns = [f"{name}: {of_column(known, most)}" for name, known in words.get("statistics", {}).items()]
    columns += ["at which steps windows begin"] * ("begins" in words)
    columns += [f"the target: {of_column(known, most)}" for known in words.get("answers", [])]
    return ". ".join(columns)


def of_column(known: Mapping[str, Any], most: int | None = SHOWN) -> str:
    """What is said of one column."""
    if known["kind"] == "category":
        names = [f"{name} ({count})" for name, count in known["counts"].items()]
        said = f"{len(names):,} categories by name and count: {_some(names, most)}" if names else "no category's name"
        said += f"; {known['others']:,} rows of others" * bool(known["others"])
        return said + f"; {known['missing']:,} missing"
    if known["kind"] == "date":
        return f"years ({of_column({'kind': 'number', **known['years']}, most)}), and whether dates have a time of day"
    if not known["known"]:
        return f"nothing but that {known['missing']:,} are missing"
    near = f", counts around {len(known['near'])} values" if known["near"] else ""
    return f"count {known['known']:,}, mean {known['mean']:.4g}, deviation {known['deviation']:.4g}{near}"


def _scores(rows: Sequence[Sequence[Any]]) -> str:
    """Scores by split and model."""
    by: dict[str, list[str]] = {}
    for model, split, metric, value in rows:
        by.setdefault(f"{split} ({model})", []).append(f"{metric} {value:.4g}")
    return ", ".join(f"{name} {' '.join(values)}" for name, values in by.items())


def _some(names: Sequence[str], most: int | None) -> str:
    more = 0 if most is None else max(0, len(names) - most)
    return ", ".join(names[:most]) + f" and {more:,} more" * bool(more)
