"""A rehearsal at a site, with nobody else: whether its file and a run's model fit, and everything that would leave.

The server's program runs here for one round, in a folder that is deleted, with this site and a twin of it, as most
methods need two, and masks three. What the site replies is listed; so the list is of the program that will run, not of
its manual.
"""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kinfed.core import trees
from kinfed.core.training import Training
from kinfed.data.tables.column import FEW
from kinfed.data.tables.frame import Frame
from kinfed.data.tables.row_examples import CALLED
from kinfed.errors import RunError, UsageError, several
from kinfed.runs.config import experiment, plugins

from .. import plan
from ..server.schema_negotiation import is_number
from ..server.server import serve
from ..site import site_examples
from ..site.drawn_rows import REVEALS, STEP
from ..site.masked_rounds import MaskedRounds
from ..site.policy import Policy
from ..site.site import SENT, STAYS, Site
from ..site.site_reading import Reading
from ..wire import contents, keys, messages
from ..wire.messages import Failure, Fields, Message, Node

Report = Callable[[str], object]
SHOWN = 12  # names that a line lists
# Settings of [flower] that say what examples are.
KEPT = ("scale", "categories", "labels", "counts", "horizons", "calendar", "quantiles", "classes")


@dataclass
class Here:
    """A transport to sites in this process; keeps what the first one replies."""

    sites: Sequence[Site]
    left: dict[str, Message] = field(default_factory=dict)  # the last reply of each kind
    _arrived: dict[str, Message | Failure] = field(default_factory=dict)

    def nodes(self) -> dict[int, Node]:
        return {i: Node("", site.name) for i, site in enumerate(self.sites)}

    def push(self, node: int, kind: str, message: Message, seconds: float) -> str:
        reply = self.sites[node].reply(kind, message)
        id = f"{len(self._arrived)} {kind} {node}"
        self._arrived[id] = reply
        if node == 0:
            before = self.left.get(kind, Message({}, {}))
            self.left[kind] = Message({**before.fields, **reply.fields}, {**before.arrays, **reply.arrays})
        return id

    def pull(self, ids: Iterable[str]) -> dict[str, Message | Failure]:
        return {id: self._arrived[id] for id in ids}


def rehearse(
    client: str,
    examples: Path | Frame,
    reading: Reading,
    code: Sequence[Path],
    device: str,
    run: Path | None,
    report: Report,
    policy: Policy | None = None,
) -> None:
    """Report whether a site's file and the model of a run's config fit, and what would leave the site.

    Without a config only the file is checked, with a linear model. What `policy` withholds is not listed. Raises
    UsageError or RunError for what does not fit.
    """
    keys.check_name(client)
    with plugins.local(code):
        raw = (
            plugins.for_sites(experiment.read(str(run), []))
            if run
            else {"method": "fedavg", "model": {"name": "linear"}}
        )
        shared = raw.get("flower", {})
        flower = shared if isinstance(shared, dict) else {}
        with tempfile.TemporaryDirectory(prefix="kinfed-check-") as folder:
            links = Path(folder) / "links.csv"
            names, private = _name_twins(client, raw)
            links.write_text(f"from,to\n{client},{names[1]}\n")
            kept = {key: flower[key] for key in KEPT if key in flower}
            flower = kept | {"clients": len(names), "patience": 1.0, "graph": str(links), "beside": []}
            planned = plan.resolve(raw | private | {"rounds": 1, "evaluate_every": 1, "flower": flower})
            reports: list[str] = []
            called = str(examples) if isinstance(examples, Path) else examples.name
            data = site_examples.keep_examples(examples, Path(folder))

            def hear(text: str) -> None:
                reports.append(text if data == examples else text.replace(str(data), called).replace(data.name, called))

            rules = replace(policy or Policy(), runs="any")
            rules = replace(rules, members="")
            at = Path(folder)
            sites = [Site(n, data, at, device, reading, code, hear, rules, MaskedRounds(n)) for n in names]
            here = Here(sites)
            if "refused" in sites[0].reply("hello", Message({}, {})).fields:
                raise UsageError(reports[0].removeprefix(f"client {client}: "))
            try:
                summary = serve(planned, here, Path(folder) / "run", log=lambda text: None, poll=0.0)
            except (UsageError, RunError) as problem:
                why = next((line for line in reports if line.startswith(f"client {client}: ")), str(problem))
                raise UsageError(why.removeprefix(f"client {client}: ")) from None
    outputs = several(summary.data.outputs or 0, "output")
    report(f"file      {called} fits: by its own rows an example is {summary.data.shape}, and a model has {outputs}")
    for line in dict.fromkeys(line for line in reports if not line.startswith(("client ", "tensors: ", SENT, STAYS))):
        report(f"note      {line}")
    if line := _describe_undecided(here.left["hello"].fields, flower):
        report(f"note      {line}")
    if run:
        named = plugins.short_name(planned.table["model"]["name"])
        report(f"model     {named} fits: {summary.cost.parameters:,} parameters; method {summary.method}")
        report(next(line.replace(": ", "   ", 1) for line in reports if line.startswith("tensors: ")))
    else:
        report("model     not checked: give the run's config, --check FILE.toml")
    report("what leaves this site for the server, besides why it refuses a message when it does:")
    for line in _leaving(here.left, planned.learning.training if run else None):
        report(line)


def _name_twins(client: str, raw: Fields) -> tuple[list[str], Fields]:
    """The sites of a rehearsal, as many as a plan needs, and what the plan must say for so few."""
    privacy = raw.get("privacy", {})
    if isinstance(privacy, dict) and privacy.get("masked") is True:
        return [client, f"{client}-twin", f"{client}-triplet"], {"privacy": {**privacy, "members": 3}}
    return [client, f"{client}-twin"], {}


def _leaving(left: dict[str, Message], training: Training | None) -> list[str]:
    """What the replies of a site hold, a line each; `training` is the plan's, None without a model."""
    lines = [f"greeting  {line}" for line in _greeting(left["hello"].fields)]
    if "describe" in left:
        lines += [f"columns   {line}" for line in _description(left["describe"].fields)]
    lines.append("joining   how many training examples it has" + _arrays(left["join"]))
    if training is not None and training.noise is not None:
        limit = f"epsilon {training.noise.limit:g} at delta {training.noise.delta:g}"
        lines.append(f"round     no scores{_arrays(left['round'])}, trained with noise of this site's own:")
        kept = "for each training row" if training.noise.unit == "row" else "for all of this site, in sums alone"
        lines.append(f"          {limit} {kept}, in all rounds together")
        return lines
    if training is not None:
        lines.append(f"round     its scores (validation and test){_arrays(left['round'])}")
        rows = f"a step takes {several(min(training.batch, left['join'].fields['size']), 'row')} here"
        lines.append(f"          {rows}; fewer than {STEP} are refused without --few-rows, as {REVEALS}")
        lines.append("          and a server that crafts models can read rows out of more, as docs/privacy.md says")
    else:
        lines.append("round     its scores (validation and test), and what the method uploads")
    lines.append("verdict   the scores of what it could do without others: Local, and standard models of its own rows")
    return lines


def _arrays(message: Message) -> str:
    forms = messages.forms({name: t for name, t in message.arrays.items() if t.numel()}).items()
    listed = [f"{name} ({dtype.removeprefix('torch.')} {list(shape)})" for name, (dtype, shape) in forms]
    size = f", {trees.size(message.arrays):,} bytes" if listed else ""
    return f"; tensors: {_some(listed)}{size}" if listed else ""


def _greeting(fields: Fields) -> list[str]:
    lines = ["its name and version of kinfed"]
    if table := fields.get("table"):
        units = {name: f" in {unit}" for name, unit in table["units"].items()}
        named = [f"{name} ({CALLED.get(kind, kind)}{units.get(name, '')})" for name, kind in table["kinds"].items()]
        lines.append(f"names and kinds of {several(len(named), 'column')}: {_some(named)}")
        labels = f"; its {'values' if _whole(table) else 'classes'}: {_some(table['labels'])}"
        labels = labels if table["labels"] else ", numbers"
        lines.append(f"the target: {', '.join(table['targets'])}{labels}")
        lines.append(f"that its rows are{'' if table['in_order'] else ' not'} split in time order")
    elif series := fields.get("series"):
        count = int(sum(part[2] for part in series["times"]))
        lines.append(
            f"the name of the target, {fields['columns'][0]}, and the times of {several(count, 'reading')}, as "
            f"{several(len(series['times']), 'run')} of equal steps"
        )
        if named := [f"{name} ({CALLED.get(kind, kind)})" for name, kind in series["kinds"].items()]:
            lines.append(f"names and kinds of {several(len(named), 'covariate')}: {_some(named)}")
    else:
        lines.append(f"the shape of an example, {fields['shape']}, and {fields['outputs']:,} classes or outputs")
    return lines


def _whole(table: Fields) -> bool:
    """Whether the labels of a table are numbers."""
    return bool(table["labels"]) and all(map(is_number, table["labels"]))


def _describe_undecided(fields: Fields, flower: Fields) -> str:
    """What a site by itself cannot say of its target; empty if nothing."""
    table = fields.get("table")
    if table is None or not _whole(table) or flower.get("counts") or not flower.get("labels", True):
        return ""
    count = several(len(table["labels"]), "different whole number")
    return (
        f"'{table['targets'][0]}' has {count} here: whether these are classes is decided with all sites' counts; with "
        f"more than {FEW} in all, or other numbers at any site, it is a number, and a model has one output"
    )


def _description(fields: Fields) -> list[str]:
    """What is told of the training rows, column by column."""
    lines = [f"of {several(fields['rows'], 'training row')}:"]
    for name, statistics in fields.get("statistics", {}).items():
        lines.append(f"  {name}: {contents.describe_column(statistics)}")
    if "begins" in fields:
        lines.append("  at which steps windows begin")
    for i, statistics in enumerate(fields.get("answers", [])):
        number = f" {i + 1}" if len(fields["answers"]) > 1 else ""
        lines.append(f"  the target{number}: {contents.describe_column(statistics)}")
    return lines


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
