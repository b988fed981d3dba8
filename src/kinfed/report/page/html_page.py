"""Page: finished runs as one HTML file that needs no network."""

import base64
import hashlib
import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ... import __version__
from ...core.history import KINDS
from ...core.summary import describe_privacy
from ...errors import UsageError, list_seeds, log_failure, several
from ...files import replacing
from ...methods.solved import KNOWN
from ...runs.baselines import NAMES
from ...verdict.verdict import BEST_ALONE, BEST_POOLED
from ..tables.compare import verdict_on
from ..tables.run_rows import Row
from ..tables.text_table import Grid, quantity
from . import page_settings
from .gather import Gathered, gather
from .overview import Part, format_score, front_of, of_sites, tables_beside
from .page_data import attempt, contents, tabulate_effects, word

TEMPLATE = Path(__file__).parent / "template"
FOREST, EDGE = 150, 8  # width of the drawing of an interval, and what stays free on its sides
MINUS = "\u2212"  # as people write it


def write(paths: Sequence[Path], out: Path) -> None:
    """Write the report on the runs in these folders; raises UsageError where they cannot stand on one page."""
    text = page(paths)
    if out.is_dir():
        raise UsageError(f"{out} is a folder; name a file with -o, such as {out / 'page.html'}")
    if not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent} for the page; make it, or choose another -o")
    with replacing(out) as part:
        part.write_text(text, encoding="utf-8")


def page(paths: Sequence[Path]) -> str:
    """The report as the text of one HTML file: of runs side by side, or of a folder with several such sets of runs.

    Everything that comes from a run's folder is escaped, or lies as JSON in a block that no browser runs; the page's
    own script and style are the only ones that its policy allows.
    """
    style, script = ((TEMPLATE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made = {"version": __version__, "written": time.strftime("%Y-%m-%d %H:%M")}
    front = front_of(paths[0]) if len(paths) == 1 else None
    template = environment.get_template("run.html")
    runs = list[dict[str, Any]]()
    refused = list[str]()
    for part in [Part("", paths)] if front is None else front.parts:
        try:
            context = _part(part, len(front.parts) if front else 1)
        except Exception as problem:
            if front is None:
                raise
            refused.append(f"{part.name} has no page of its own: {log_failure(problem)}")
            continue
        runs.append(
            {"name": part.name, "headline": context["headline"], "text": Markup(template.render(**context, **made))}
        )
    return environment.get_template("page.html").render(
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; img-src data:",
        headline=front.headline if front else runs[0]["headline"],
        front=front,
        picture=f"data:image/png;base64,{_encode(front.picture.read_bytes())}" if front and front.picture else "",
        runs=runs,
        refused=refused,
        folder=paths[0] if paths else "",
        **made,
    )


def _part(part: Part, parts: int) -> dict[str, Any]:
    """What the page says of runs that stand side by side, one of so many sets of them."""
    gathered = gather(part.folders, part.labels, part.judged, part.same_data)
    data, lacking = contents(gathered, parts)
    main, context = gathered.rows[gathered.main].folder, _make_context(gathered, lacking)
    notes, none = context["notes"], list[Grid]()
    notes += part.notes
    tables = [grid for row in gathered.rows for grid in tabulate_effects(row, notes)]
    if len(part.folders) == 1:
        tables += attempt(notes, "what else was tried is not shown", none, partial(tables_beside, part.folders[0]))
    if main.is_finished:
        tables += attempt(notes, "sites are not shown", none, partial(of_sites, main, main.read_summary()))
    return {**context, "data": _embed_json(data), "tables": tables}


def _digest(text: str) -> str:
    """What a content security policy calls a script or a style."""
    return f"'sha256-{_encode(hashlib.sha256(text.encode()).digest())}'"


def _encode(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _embed_json(data: Any) -> Markup:
    """JSON that cannot end the block it lies in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(text)


def _make_context(gathered: Gathered, lacking: Sequence[str]) -> dict[str, Any]:
    """What the page says in words and tables."""
    main, rows = gathered.rows[gathered.main], gathered.rows
    judged = _verdict(gathered)
    scale = _Forest([interval for row in rows for interval in (row.verdict or {}).get("over", {}).values()])
    headline, lead = _sentence(gathered, judged)
    folders = [main.folder, *(run.folder for run in main.runs)]
    config = next((folder for folder in folders if folder.is_begun), folders[0])
    return {
        "about": _about(main),
        "headline": headline,
        "lead": lead,
        "facts": list(_facts(main, judged)),
        "cautions": _cautions(gathered),
        "chosen": gathered.labels[gathered.main] if gathered.candidates > 1 else "",
        "notes": [*gathered.notes, *lacking],
        "metric": word(main.metric.name),
        "unit": f" ({main.metric.unit})" if main.metric.unit else "",
        "gain_unit": _gain_unit(main),
        "zero": scale.x(0),
        "forest": FOREST,
        "methods": [
            _method(row, label, scale, i == gathered.main)
            for i, (row, label) in enumerate(zip(rows, gathered.labels, strict=True))
        ],
        "papers": _papers(rows),
        "settings": page_settings.settings(config),
        "commands": list(_commands(gathered)),
        "folder": main.folder,
        "baselines": [
            (baseline["name"], _score(main, baseline["mean"]), f"needs {baseline['needs']}")
            for baseline in main.summary.baselines or ()
        ],
    }


def _papers(rows: Sequence[Row]) -> list[str]:
    """What each method is, and what it does otherwise than its paper, as its file says it."""
    methods = dict.fromkeys(row.method for row in rows)
    names = [name for name in methods if name in KNOWN]
    differs = {name: KNOWN.differs(name) for name in names}
    return [KNOWN.summary(name) + (f" Differs: {differs[name]}" if differs[name] else "") for name in names]


def _commands(gathered: Gathered) -> Iterator[tuple[str, str]]:
    """What repeats each run, into folders that differ."""
    names = [row.folder.path.resolve().name for row in gathered.rows]
    for row, label, name in zip(gathered.rows, gathered.labels, names, strict=True):
        folder_name = name if names.count(name) == 1 else re.sub(r"[^\w.=+-]+", "-", f"{row.method}-{name}")
        yield label, page_settings.command(row.folder, folder_name)


def _verdict(gathered: Gathered) -> dict[str, Any] | None:
    """The verdict on the run that is judged; it says so where the page has chosen it among several."""
    row = gathered.rows[gathered.main]
    places = (gathered.find_method("local"), gathered.find_method("fedavg"))
    if row.verdict is None or gathered.candidates < 2 or row.verdict["candidates"] > 1 or places[0] is None:
        return row.verdict
    local, fedavg = (None if i is None else gathered.rows[i].by_seed for i in places)
    assert local is not None
    seeds = [seed for seed in row.seeds if seed in local and (fedavg is None or seed in fedavg)]
    if not seeds:
        return None
    verdict = verdict_on(row, seeds, local, fedavg, gathered.rows, gathered.candidates)
    return None if verdict is None else verdict.to_dict()


def _sentence(gathered: Gathered, judged: dict[str, Any] | None) -> tuple[str, str]:
    """The verdict as a headline and the rest of its sentence."""
    row = gathered.rows[gathered.main]
    if judged is not None:
        head, _, rest = judged["sentence"].partition(": ")
        notes = ". ".join(note[:1].upper() + note[1:] for note in judged.get("notes", []))
        head = head[:1].upper() + head[1:].removesuffix(".")
        return head, " ".join(filter(None, [rest[:1].upper() + rest[1:], notes and f"{notes}."]))
    score = f"{row.method} has a mean test {word(row.metric.name)} of {_score(row, row.mean, True)} over "
    score += several(row.summary.data.clients, "client")
    if row.method == "local" or gathered.find_method("local") is not None:
        return "There is nothing to compare", f"{score[0].upper()}{score[1:]}; no other method is among these runs."
    return (
        "Local is not among these runs",
        f"So this page cannot say what learning from others was worth. {score[0].upper()}{score[1:]}.",
    )


def _about(row: Row) -> str:
    summary = row.summary
    clients, rounds = several(summary.data.clients, "client"), several(summary.rounds, "round")
    sizes = f"{clients}, {rounds}, {list_seeds(row.seeds)}"
    return f"{row.method} on {summary.data.dataset}: {sizes}, a model of {summary.cost.parameters:,} parameters"


def _facts(row: Row, judged: dict[str, Any] | None) -> list[tuple[str, str, str]]:
    """The few numbers to remember: the number, what it is, and how sure."""
    spread = f"± {_score(row, row.scores['std'])} over clients"
    facts = [(_score(row, row.mean, True), f"mean test {word(row.metric.name)}", spread)]
    for base, name in (("alone", BEST_ALONE), ("pooled", BEST_POOLED)):
        if base in (over := _list_differences(row, judged)):
            mean, interval = _difference(row, over[base])
            facts.append((mean, f"{_gain_unit(row)} over {name}, {(judged or {})['baselines'][base]}", interval))
    if judged is not None and row.method != "local" and _by_example(row):
        gain, lose, rest = (len(judged[side]) for side in ("gain", "lose", "undecided"))
        if gain or lose:  # else the sentence says that no client's difference can be told
            facts.append((f"{gain:,} gain, {lose:,} lose", "clients, beyond noise", f"{rest:,} undecided"))
    return facts


def _list_differences(row: Row, judged: dict[str, Any] | None) -> dict[str, dict[str, float | None]]:
    """A verdict's differences, except that of a baseline over itself."""
    names = (judged or {}).get("baselines", {})
    return {
        base: difference
        for base, difference in (judged or {}).get("over", {}).items()
        if base in names and names[base] != NAMES.get(row.method)
    }


def _by_example(row: Row) -> bool:
    """Whether single test examples tell which clients gain."""
    return all(run.folder.tested.exists() for run in row.runs)


def _cautions(gathered: Gathered) -> list[tuple[str, str]]:
    cautions: dict[tuple[str, str], None] = {}
    for row, label in zip(gathered.rows, gathered.labels, strict=True):
        summary = row.summary
        if summary.selection.caution:
            cautions["Leaking", f"{label}: {summary.selection.caution}. Its scores are not a fair estimate."] = None
        if row.origin == "oracle":
            cautions["Oracle", f"{label} uses a graph that a real server would not know."] = None
        if summary.attack is not None:
            cautions["Attack", f"{label}: {row.attack}; scores are those of honest clients."] = None
        if summary.privacy is not None:
            cautions["Privacy", f"{label}: {describe_privacy(summary)}."] = None
        if summary.cost.precision not in (None, "float32"):
            cautions["Precision", f"{label} was trained in {summary.cost.precision}."] = None
        cautions |= {("Warning", f"{label}: {warning}"): None for warning in row.warnings}
    if gathered.find_method("local") is None:
        nothing = "Nothing here says what learning from others is worth, as Local is not among the runs."
        without_local = (
            "Local is not among the runs; the verdict is the run's own, and of single clients nothing can be said."
        )
        cautions["No Local", nothing if gathered.rows[gathered.main].verdict is None else without_local] = None
    scaled = [part for row in gathered.rows for part in row.folder.path.absolute().parts if "-scaled-" in part]
    if scaled:
        cautions["Scaled", f"A smaller copy of a published experiment ({scaled[0]}): fewer rounds and examples."] = None
    return list(cautions)


def _method(row: Row, label: str, scale: "_Forest", judged: bool) -> dict[str, Any]:
    scores = [run.summary.honest_scores[row.model] for run in row.runs]
    worst, best = (float(sum(s.get(k, math.nan) for s in scores) / len(scores)) for k in ("worst5", "best5"))
    judgement = row.verdict or {}
    over = _list_differences(row, judgement)
    tested_by_example = judgement and row.method != "local" and _by_example(row)
    sides = [len(judgement[side]) for side in ("gain", "undecided", "lose")] if tested_by_example else None
    return {
        "label": label,
        "judged": judged,
        "model": row.model,
        "kind": KINDS.get(row.model, ""),
        "mean": _score(row, row.mean),
        "spread": _score(row, row.scores["std"]),
        "seeds": None if row.over_seeds is None else _score(row, row.over_seeds),
        "worst": _score(row, worst),
        "best": _score(row, best),
        "over": {base: _difference(row, over[base]) for base in over},
        "drawn": scale.place(over["alone"]) if "alone" in over else None,
        "sides": sides,
        "origin": "" if row.origin in (None, "fixed") else row.origin,
        "up": quantity(row.summary.cost.bytes_up, "B"),
        "down": quantity(row.summary.cost.bytes_down, "B"),
        "seconds": f"{row.seconds:.1f}",
        "leaking": row.leaking,
    }


class _Forest:
    """Where numbers lie in the drawing of intervals, the same for all methods."""

    def __init__(self, differences: Sequence[dict[str, float | None]]) -> None:
        bounds = (difference[key] for difference in differences for key in ("mean", "low", "high"))
        values = [0.0, *(value for value in bounds if value is not None)]
        self.low, high = min(values), max(values)
        self.high = high if high > self.low else self.low + 1

    def x(self, value: float) -> float:
        """In pixels from the left."""
        return round(EDGE + (FOREST - 2 * EDGE) * (value - self.low) / (self.high - self.low), 1)

    def place(self, difference: dict[str, float | None]) -> dict[str, float]:
        """The places of an interval's mean and bounds; the bounds are the mean's where there are none."""
        mean = difference["mean"] or 0.0
        bounds = {key: mean if (value := difference[key]) is None else value for key in ("low", "high")}
        return {"mean": self.x(mean)} | {key: self.x(value) for key, value in bounds.items()}


def _gain_unit(row: Row) -> str:
    if not row.metric.higher_is_better:
        return "% less error"
    return "points" if row.metric.is_share else word(row.metric.name)


def _difference(row: Row, gain: dict[str, float | None]) -> tuple[str, str]:
    """A gain and its interval as text; a positive one is better."""
    shares = row.metric.is_share if row.metric.higher_is_better else gain.get("relative", True)
    times, digits = (100, ".1f") if shares else (1, ".3g")
    mean, low, high = gain["mean"], gain["low"], gain["high"]
    interval = "no interval" if low is None or high is None else f"{times * low:{digits}} to {times * high:{digits}}"
    text = "" if mean is None else f"{times * mean:+{digits}}"
    return text.replace("-", MINUS), interval.replace("-", MINUS)


def _score(row: Row, value: float, unit: bool = False) -> str:
    return format_score(value, row.metric.is_share, unit)
