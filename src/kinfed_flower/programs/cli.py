"""kinfed flower."""

import argparse
import dataclasses
import importlib.util
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kinfed.cli.console import Literal
from kinfed.cli.options import REPEATED
from kinfed.errors import UsageError
from kinfed.files import make_folder, to_json

HOME = "KINFED_FLOWER_HOME"
READING = (
    "Settings, key=value, say how it is read: past=N and horizon=N, the readings of a series that are the input and "
    "those to predict, future=A,B and static=A,B, its columns that are known ahead or never change; categories=N, the "
    "most names of a text column that are sent to the server (default: 1000; 0: none); decimal=, thousands=. "
    "dates=%d.%m.%Y units=kg text=COLUMN, how numbers, dates and text are written (default: 1200.5 and 2025-01-31)."
)


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the commands to the parser."""
    flower = commands.add_parser(
        "flower",
        description="Train with clients that keep their examples on their own machines, connected by Flower.",
        epilog="in this order: keys and up on the server, node at every site, run on the server; see docs/deploy.md. "
        f"The server's own files are in ${HOME} (default: ~/.kinfed/flower).",
    )
    flower.set_defaults(command=_act)
    actions = flower.add_subparsers(required=True, metavar="ACTION")
    keys = _action(actions, common, "keys", _keys, "make certificates for the server and keys for the sites")
    keys.add_argument("folder", type=Path, metavar="DIR", help="the folder for the keys; keys already in it are kept")
    keys.add_argument("sites", nargs="*", metavar="SITE", help="the clients' names")
    what = "name or address by which sites reach the server; may be repeated (this machine is always included)"
    keys.add_argument("--host", **REPEATED, metavar="NAME", help=what)
    up = _action(actions, common, "up", _up, "start the server and admit the sites that have keys")
    up.add_argument("--keys", type=Path, metavar="DIR", help="the folder made by kinfed flower keys")
    up.add_argument("--insecure", action="store_true", help="use no keys: for trials on one machine")
    up.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    up.add_argument("--port", type=int, default=8000, help="port to listen on (default: 8000)")
    _add_node(actions, common)
    _add_run(actions, common)
    agree = _action(
        actions, common, "agree", _agree, "at a site: show what would leave in runs of a plan, and agree to it"
    )
    agree.add_argument("site", metavar="SITE", help="this client's name")
    what = "the config of the run, as the server's operator sent it (default: what the server asked the node for)"
    agree.add_argument("plan", nargs="?", default="", metavar="FILE.toml", help=what)
    _add_examples(agree, needed=False)
    log = _action(actions, common, "log", _log, "verify and print an audit log: what left, to whom, and what came")
    log.add_argument("where", type=Path, metavar="DIR", help="a run's folder, or a site's, such as kinfed-site/ann")
    app = _action(actions, common, "app", _app, "write a plan as an app that flwr run starts on any Flower deployment")
    app.add_argument("folder", type=Path, metavar="DIR", help="the folder for the app")
    app.add_argument("plan", metavar="FILE.toml", help="the config of the run; see docs/deploy.md")
    what = "settings, such as training.epochs=5, and of how sites read their tables"
    app.add_argument("overrides", nargs="*", metavar="key=value", help=what)
    _add_reading(app)
    app.set_defaults(few_rows=False, client="")
    revoke = _action(actions, common, "revoke", _revoke, "remove a site from the federation")
    revoke.add_argument("site", metavar="SITE", help="the site's name")
    revoke.add_argument("--keys", type=Path, metavar="DIR", help="the server's keys (default: those it runs with)")
    _action(actions, common, "status", _status, "show how the run and its sites are doing")
    _action(actions, common, "down", _down, "stop the server")


def _action(actions: Any, common: argparse.ArgumentParser, name: str, act: Any, what: str) -> argparse.ArgumentParser:
    """The parser of an action, whose own help says what it does as the list of actions does."""
    parser: argparse.ArgumentParser = actions.add_parser(
        name, parents=[common], help=what, description=f"{what[0].upper()}{what[1:]}."
    )
    parser.set_defaults(action=act)
    return parser


def _add_node(actions: Any, common: argparse.ArgumentParser) -> None:
    node = _action(actions, common, "node", _node, "take part as a client until interrupted")
    node.add_argument("site", metavar="SITE", help="this client's name")
    _add_examples(node)
    node.add_argument(
        "--server", default="127.0.0.1:8000", metavar="HOST:PORT", help="where the server is (default: 127.0.0.1:8000)"
    )
    node.add_argument("--keys", type=Path, metavar="DIR", help="this site's folder of keys, with ca.crt and key")
    node.add_argument("--insecure", action="store_true", help="use no keys: for trials on one machine")
    node.add_argument(
        "--check",
        nargs="?",
        const="",
        metavar="FILE.toml",
        help="connect to nobody: say whether the file, and the model of this config, fit, and what would leave the "
        "site",
    )
    what = "agree to one run of this config, unless that was agreed to before; may be repeated (default: ask for each)"
    node.add_argument("--agree", **REPEATED, type=Path, metavar="FILE.toml", help=what)


def _add_examples(node: argparse.ArgumentParser, needed: bool = True) -> None:
    """Which examples a site has, how they are read, and within which limits they are used."""
    default = "" if needed else " (default: those of its node, read as it reads them)"
    node.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="how its table is read, see below")
    node.add_argument(
        "--data",
        required=needed,
        metavar="FILE",
        help="this client's examples: .csv, .parquet, a folder of these, .npz, or with --query a database "
        f"(postgresql://USER@HOST/NAME, sqlite:///FILE){default}",
    )
    node.add_argument(
        "--client",
        default="",
        metavar="COLUMN",
        help="a column of the table that names clients, or several as a,b: each takes part, as SITE.CLIENT or "
        "SITE.A.B, and all train as one batch",
    )
    node.add_argument(
        "--query", metavar="FILE.sql", default="", help="for a database: the SELECT to read, as a file or as text"
    )
    _add_reading(node)
    what = "a file whose methods, models and other parts the server may name; may be repeated"
    node.add_argument("--code", **REPEATED, type=Path, metavar="FILE.py", help=what)
    node.add_argument(
        "--few-rows",
        action="store_true",
        help="take part even with fewer than 10 training rows, or in runs whose gradients are of fewer than 8 rows: "
        "these reveal single rows to the server",
    )
    node.add_argument(
        "--policy",
        type=Path,
        metavar="FILE.toml",
        help="the limits within which this site takes part; see docs/deploy.md (default: its operator agrees to each "
        "run)",
    )
    node.add_argument(
        "--state",
        type=Path,
        default=Path("kinfed-site"),
        metavar="DIR",
        help="folder for private state and models (default: kinfed-site)",
    )
    node.add_argument("--device", default="auto", help="where to train: auto, cpu, cuda or cuda:i (default: auto)")


def _add_reading(node: argparse.ArgumentParser) -> None:
    table = node.add_argument_group("a table, or a series", READING)
    table.add_argument(
        "--target",
        default="y",
        metavar="COLUMN",
        help="column to predict, by the agreed name; several as a,b (default: y)",
    )
    what = "a column of the file, and the agreed name for it; may be repeated"
    table.add_argument("--column", **REPEATED, metavar="THEIRS=OURS", help=what)
    table.add_argument("--ignore", default="", metavar="A,B,...", help="columns that are not inputs (default: none)")
    table.add_argument(
        "--time", default="", metavar="COLUMN", help="column of times: rows are split in chronological order"
    )
    table.add_argument(
        "--group",
        default="",
        metavar="COLUMN",
        help="a person or thing that has several rows; these stay in one part of the split",
    )
    table.add_argument(
        "--weight", default="", metavar="COLUMN", help="how many rows each row counts for; it stays here"
    )


def _add_run(actions: Any, common: argparse.ArgumentParser) -> None:
    run = _action(actions, common, "run", _run, "train with the connected sites")
    what = "the config of the run, see docs/deploy.md; or the folder of a run that is resumed"
    run.add_argument("plan", type=Path, metavar="FILE.toml|DIR", help=what)
    run.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as training.epochs=5")
    run.add_argument(
        "--out", type=Path, metavar="DIR", help="the run's folder on the server (default: runs/METHOD/sites/TIME)"
    )
    run.add_argument(
        "--track",
        **REPEATED,
        metavar="WHERE",
        help="track the run in tensorboard, mlflow, wandb or a class of yours, FILE.py:NAME; may be "
        "repeated; a resumed run keeps them (docs/runs.md)",
    )
    run.add_argument(
        "--beside",
        metavar="WHICH",
        help="baselines that each site compares its model with: local, which sites train by themselves; local,fedavg, "
        "which takes as many rounds again; or none (default: local)",
    )
    run.add_argument("--quiet", action="store_true", help="print only the results")
    run.add_argument("--verbose", action="store_true", help="also print bytes, seconds and which tensors travel")


def _act(args: argparse.Namespace, console: Console) -> None:
    if importlib.util.find_spec("flwr") is None:
        raise UsageError("kinfed flower needs Flower; install it: pip install 'kinfed[flower]'")
    from ..wire import flower_names

    if problem := flower_names.unusable():
        raise UsageError(problem)
    os.umask(0o077)  # only this user may read what is created from here on
    args.action(args, console)


def _keys(args: argparse.Namespace, console: Console) -> None:
    from ..wire import keys

    renewed = not (args.folder / "ca.crt").exists() and any(args.folder.glob("sites/*/key.pub"))
    made = keys.make(args.folder, args.host, args.sites)
    if renewed:
        console.print(
            f"made a new authority: replace every site's ca.crt with {args.folder / 'ca.crt'} and restart the server "
            "(kinfed flower down, then up); sites keep their keys",
            soft_wrap=True,
        )
    for folder in made:
        console.print(
            f"give {folder} to {folder.name} and to nobody else: whoever has its key is {folder.name}", soft_wrap=True
        )
    if not made:
        console.print(f"the keys are in {args.folder}", soft_wrap=True)


def _up(args: argparse.Namespace, console: Console) -> None:
    from . import superlink

    keys = _keys_or_insecure(args, "kinfed flower keys DIR SITE ...")
    superlink.up(_home(), args.host, args.port, keys, _printer(console))


def _node(args: argparse.Namespace, console: Console) -> None:
    from ..site import site_examples
    from ..wire.link import Link
    from . import node

    reading = _reading(args)
    if args.check is not None:
        _check(args, Path(args.check) if args.check else None, console)
        return
    keys = _keys_or_insecure(args, "kinfed flower keys on the server")
    host, colon, port = args.server.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise UsageError(f"--server must be HOST:PORT, such as hub.example.org:8000; got '{args.server}'")
    for name in ("ca.crt", "key"):
        if keys and not (keys / name).is_file():
            raise UsageError(f"{keys} lacks {name}; --keys must name this site's folder, made by kinfed flower keys")
    link = Link(args.server, str(keys / "ca.crt") if keys else "")
    key = keys / "key" if keys else None
    rules = _rules(args)
    examples = site_examples.open_examples(args.data, args.query, reading)
    report = _printer(console)
    if args.agree:
        names = node.names_of(args.site, examples, reading)
        node.agree_beforehand(names, args.state, args.code, args.agree)
    node.run(args.site, examples, reading, args.state, link, key, args.device, args.code, report, rules)


def _check(args: argparse.Namespace, plan: Path | None, console: Console) -> None:
    """Say what would leave a site."""
    from ..site import site_examples

    reading = _reading(args)
    examples = site_examples.open_examples(args.data, args.query, reading)
    _rehearse(args, examples, reading, args.code, plan, console)


def _rehearse(
    args: argparse.Namespace, examples: Any, reading: Any, code: Any, plan: Path | None, console: Console
) -> None:
    from .site_check import rehearse

    if reading.client:  # what one client is checked for, with the rows of all
        reading = dataclasses.replace(reading, ignore=(*reading.ignore, reading.client), client="")
    rehearse(args.site, examples, reading, code, args.device, plan, _printer(console), _rules(args))


def _rules(args: argparse.Namespace) -> Any:
    from ..site.policy import Policy

    return Policy.read(args.policy) if args.policy else None


def _reading(args: argparse.Namespace) -> Any:
    from ..site.site_reading import Reading, columns_in, names_of, settings_of

    return Reading(
        target=args.target,
        columns=names_of(args.column),
        ignore=columns_in(args.ignore),
        time=args.time,
        group=args.group,
        weight=args.weight,
        client=args.client,
        few_rows=args.few_rows,
        **settings_of(args.overrides),
    )


def _run(args: argparse.Namespace, console: Console) -> None:
    from kinfed.cli.training import show
    from kinfed.data.graph_files import GraphFile
    from kinfed.runs import trackers
    from kinfed.runs.config import experiment, parts, plugins
    from kinfed.runs.run_folder import RunFolder

    from .. import plan
    from . import follow, superlink

    trackers.check(args.track)
    if resumed := args.plan.is_dir():
        out = args.plan.resolve()
        if args.overrides or args.beside is not None or args.out is not None:
            raise UsageError(f"the run in {out} goes on by its own config; leave settings, --beside and --out out")
        if not (out / "config.toml").exists():
            raise UsageError(f"{out} is not the folder of a run: it has no config.toml")
        if (folder := RunFolder(out)).is_finished:
            console.print(f"the run in {out} has finished", soft_wrap=True)
            if args.track:
                raise UsageError("trackers follow a run while it goes on, and this one has finished; leave --track out")
            show(folder.read_summary(), args, console)
            return
        raw = experiment.read(str(out / "config.toml"), [])
    else:
        raw = experiment.read(str(args.plan), args.overrides)
        if args.beside is not None:
            raw["flower"] = raw.get("flower", {}) | {"beside": _parse_beside(args.beside)}
    planned = plan.resolve(raw)
    if not resumed:
        experiment.warn_of_idle(str(args.plan), args.overrides, {planned.learning.method_name: planned.learning.method})
    superlink.require(_home())
    if not resumed:
        stamp = time.strftime("%Y-%m-%d-%H%M%S")
        method = plugins.short_name(planned.learning.method_name)
        out = (args.out or Path("runs") / method / "sites" / stamp).resolve()
        if (out / "config.toml").exists():
            raise UsageError(f"{out} already holds a run; resume it: kinfed flower run {out}")
        table = plugins.absolute(planned.table)  # the run's process works in another folder
        if graph := planned.deployment.graph:
            links = GraphFile(graph) if isinstance(graph, str) else graph
            table["flower"]["graph"] = parts.plain(dataclasses.replace(links, path=str(Path(links.path).resolve())))
        make_folder(out)
        experiment.write(table, out / "config.toml")
    report = (lambda text: None) if args.quiet else _printer(console)
    summary = follow.run(_home(), out, report, args.track)
    show(summary, args, console)
    if (traffic := summary.cost.bytes_per_client_and_round) and args.verbose:
        report(f"bytes per client and round: {traffic['down']:,} down, {traffic['up']:,} up (see bytes.csv)")
    report("the models are at the sites")


def _agree(args: argparse.Namespace, console: Console) -> None:
    from kinfed.runs.config import experiment, plugins

    from .. import plan
    from ..site import agreements, site_examples
    from . import node

    examples: Any
    if args.data is None:
        examples, reading, code = node.read_options(args.state / args.site / "node")
    else:
        reading, code = _reading(args), args.code
        examples = site_examples.open_examples(args.data, args.query, reading)
    names = node.names_of(args.site, examples, reading)
    with plugins.local(code), tempfile.TemporaryDirectory(prefix="kinfed-plan-") as folder:
        path = Path(args.plan or Path(folder) / "plan.toml")
        if args.plan:
            plans = node.plans_of(path)
        else:
            plans = [plan.resolve(table) for table in agreements.read_asked(args.state / names[0])]
            if not plans:
                raise UsageError(f"no server has asked {args.site} for a run yet; give its config, FILE.toml")
            experiment.write(plans[0].table, path)
        _rehearse(args, examples, reading, code, path, console)
        for line in agreements.summary(plans[0]):
            console.print(line, soft_wrap=True)
        hashed = {agreements.agree(plans, args.state / name) for name in names}
    console.print(f"agreed: {args.site} takes part in one run of this plan, {hashed.pop()[:16]}", soft_wrap=True)


def _log(args: argparse.Namespace, console: Console) -> None:
    from kinfed.report.tables.text_table import quantity

    from ..wire import audit_file, contents

    path, count, last = audit_file.find(args.where), 0, None
    for last in audit_file.read(path):
        count += 1
        if args.json:
            print(to_json(last))
        else:
            arrow = "->" if last["way"] == "sent" else "<-"
            size = quantity(last["bytes"], "B")
            held = f"{', '.join(last['holds']) or 'nothing'} ({last['message'][:16]})"
            Literal().print(f"{last['at']} {arrow} {last['peer']} {last['kind']}, {size}: {held}", soft_wrap=True)
            if (says := last.get("says")) and (line := contents.describe_reply(says, {}, None)):
                Literal().print(f"  {line}", soft_wrap=True)
    if not args.json:
        end = f"; the hash of the last is {last['hash']}" if last else ""
        console.print(f"{path}: {count:,} messages, each as it was written{end}", soft_wrap=True)


def _app(args: argparse.Namespace, console: Console) -> None:
    from kinfed.runs.config import experiment

    from ..site.site_reading import SETTINGS
    from . import server_app as app

    is_read = {override: override.partition("=")[0] in SETTINGS for override in args.overrides}
    plan = experiment.read(args.plan, [override for override in args.overrides if not is_read[override]])
    args.overrides = [override for override in args.overrides if is_read[override]]
    app.write(args.folder, plan, _reading(args))
    console.print(f"start it: flwr run {args.folder} SUPERLINK --stream; see docs/deploy.md", soft_wrap=True)


def _parse_beside(text: str) -> list[str]:
    """What --beside asks for; raises UsageError for anything else, "auto" included."""
    from kinfed.runs import reference_runs

    wanted = reference_runs.parse(text)
    if isinstance(wanted, str):
        raise UsageError(f"--beside is local, local,fedavg or none; got '{text}'")
    return list(wanted)


def _revoke(args: argparse.Namespace, console: Console) -> None:
    from . import superlink

    keys = args.keys.resolve() if args.keys else None
    superlink.revoke(_home(), args.site, keys, _printer(console))


def _status(args: argparse.Namespace, console: Console) -> None:
    from . import status

    now = status.read(_home())
    if args.json:
        print(to_json(now))
        return
    out, link, run = Literal(), now["superlink"], now["run"]
    if link["address"]:
        out.print(f"the SuperLink at {link['address']} {'runs' if link['running'] else 'has stopped'}")
    else:
        out.print(f"no SuperLink of {_home()} is running; start it: kinfed flower up", soft_wrap=True)
    if run is None:
        out.print("no run has begun yet")
    else:
        out.print(_of_run(run), soft_wrap=True)
    if now["sites"]:
        out.print(_sites(now["sites"]))
    for name, site in now["sites"].items():
        if site.get("left_out"):
            out.print(f"{name} was left out: {site['left_out']}", soft_wrap=True)


def _of_run(run: dict[str, Any]) -> str:
    line = f"the run in {run['out']}: {run['state']}, round {run['round']} of {run['rounds']}, {run['seconds']:.0f} s"
    if run["why"]:
        line += f"; {run['why']}"
    if run["state"] in ("stopped", "failed"):
        line += f"; continue it: kinfed flower run {run['out']}"
    means = run["scores"].get("means", {})
    if means:
        main = next(iter(means)).split("/")[1]  # the task's own score; --json has all
        scores = [f"{name} {mean:.4g}" for name, mean in means.items() if name.split("/")[1] == main]
        line += f"\nafter round {run['scores']['round']}: {', '.join(scores)}"
    return line


def _sites(sites: dict[str, Any]) -> Table:
    from kinfed.report.tables.text_table import draw, quantity

    rows, private = [], any("spent" in site for site in sites.values())
    for name, site in sites.items():
        counts = [str(site.get(key, "")) for key in ("rounds", "missed")]
        traffic = [quantity(site[key], "B") if key in site else "" for key in ("down", "up")]
        late = f"{site['late']:.0f} s" if site.get("late") else ""
        spent = f"{site['spent']:.3g} of {site['budget']:g}" if "spent" in site else ""
        epsilon = [spent] if private else []
        rows.append([name, "online" if site["online"] else "away", *counts, *traffic, late, *epsilon])
    headings = ["site", "is", "rounds used", "missed in a row", "down", "up", "late"]
    headings += ["epsilon spent"] if private else []
    return draw(headings, rows, (0, 1), range(len(headings)))


def _down(args: argparse.Namespace, console: Console) -> None:
    from . import superlink

    superlink.down(_home(), _printer(console))


def _home() -> Path:
    """The folder of the server's own files."""
    return Path(os.environ.get(HOME) or Path.home() / ".kinfed" / "flower")


def _keys_or_insecure(args: argparse.Namespace, maker: str) -> Path | None:
    if args.insecure and args.keys:
        raise UsageError("--keys and --insecure exclude each other: give one of them")
    if not args.insecure and not args.keys:
        raise UsageError(f"give --keys DIR, made by {maker}; or --insecure for trials on one machine")
    return None if args.insecure else args.keys.resolve()


def _printer(console: Console) -> Any:
    return lambda text: console.print(text, soft_wrap=True)
