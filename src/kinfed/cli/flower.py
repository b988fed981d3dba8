"""kinfed flower."""

import argparse
import importlib.util
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import UsageError
from ..experiments import config
from ..experiments.run_folder import RunFolder
from ..files import make_folder
from .running import show

HOME = "KINFED_FLOWER_HOME"


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Put the commands into the parser."""
    flower = commands.add_parser(
        "flower",
        description="Train with clients that keep their examples on machines of their own, joined by Flower.",
        epilog="in this order: keys and up on the server, node at every site, run on the server; see docs/deploy.md",
    )
    actions = flower.add_subparsers(required=True, metavar="ACTION")
    server = argparse.ArgumentParser(add_help=False)
    server.add_argument(
        "--home",
        type=Path,
        default=os.environ.get(HOME, Path.home() / ".kinfed" / "flower"),
        metavar="DIR",
        help=f"the server's own files (default: ${HOME} or ~/.kinfed/flower)",
    )
    keys = actions.add_parser("keys", parents=[common], help="make certificates for the server and keys for sites")
    keys.add_argument("folder", type=Path, metavar="DIR", help="where they are, or will be")
    keys.add_argument("sites", nargs="*", metavar="SITE", help="the names of clients")
    keys.add_argument(
        "--host", action="append", default=[], metavar="NAME", help="name or address at which sites reach the server"
    )
    keys.set_defaults(command=_keys)
    up = actions.add_parser(
        "up", parents=[server, common], help="start the server, and let in the sites that have keys"
    )
    up.add_argument("--keys", type=Path, metavar="DIR", help="what kinfed flower keys made")
    up.add_argument("--insecure", action="store_true", help="without keys: for trials on one machine")
    up.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1, this machine alone)")
    up.add_argument("--port", type=int, default=8000, help="default: 8000")
    up.set_defaults(command=_up)
    node = actions.add_parser("node", parents=[common], help="take part as a client, until interrupted")
    node.add_argument("site", metavar="SITE", help="this client's name")
    node.add_argument(
        "--data", type=Path, required=True, metavar="FILE", help="this client's examples: .npz, .csv or .parquet"
    )
    node.add_argument(
        "--target", default="y", metavar="COLUMN", help="what a table is to predict from its other columns (default: y)"
    )
    node.add_argument("--server", default="127.0.0.1:8000", metavar="HOST:PORT", help="default: 127.0.0.1:8000")
    node.add_argument("--keys", type=Path, metavar="DIR", help="this site's folder of keys, with ca.crt and key")
    node.add_argument("--insecure", action="store_true", help="without keys: for trials on one machine")
    node.add_argument(
        "--state", type=Path, default=Path("kinfed-site"), metavar="DIR", help="private state and model go here"
    )
    node.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:i (default: auto)")
    node.set_defaults(command=_node)
    run = actions.add_parser("run", parents=[server, common], help="train with the sites that are there")
    run.add_argument("plan", nargs="?", metavar="FILE.toml", help="what to learn; see docs/deploy.md")
    run.add_argument("overrides", nargs="*", metavar="key=value", help="such as training.epochs=5")
    run.add_argument("--out", type=Path, metavar="DIR", help="on the server (default: runs/METHOD/sites/TIME)")
    run.add_argument("--resume", type=Path, metavar="DIR", help="go on with the run of this folder")
    run.add_argument("--quiet", action="store_true", help="say nothing until the end")
    run.set_defaults(command=_run)
    revoke = actions.add_parser("revoke", parents=[server, common], help="take a site out of the federation")
    revoke.add_argument("site", metavar="SITE", help="the site's name")
    revoke.add_argument("--keys", type=Path, metavar="DIR", help="the server's keys (default: those it runs with)")
    revoke.set_defaults(command=_revoke)
    down = actions.add_parser("down", parents=[server, common], help="end the server")
    down.set_defaults(command=_down)


def _keys(asked: argparse.Namespace, console: Console) -> None:
    _prepare()
    from ..flower import keys

    renewed = not (asked.folder / "ca.crt").exists() and any(asked.folder.glob("sites/*/key.pub"))
    made = keys.make(asked.folder, asked.host, asked.sites)
    if renewed:
        console.print(
            f"a new authority: give {asked.folder / 'ca.crt'} to every site in place of its own, and start the server "
            "anew (kinfed flower down, and up); sites keep their keys",
            soft_wrap=True,
        )
    for folder in made:
        console.print(f"give {folder} to {folder.name}, and to nobody else: its key says who it is", soft_wrap=True)
    if not made:
        console.print(f"the keys are in {asked.folder}", soft_wrap=True)


def _up(asked: argparse.Namespace, console: Console) -> None:
    _prepare()
    from ..flower import processes

    keys = _keys_or_insecure(asked, "kinfed flower keys DIR SITE ...")
    processes.up(Path(asked.home), asked.host, asked.port, keys, _sayer(console))


def _node(asked: argparse.Namespace, console: Console) -> None:
    _prepare()
    from ..flower import processes

    keys = _keys_or_insecure(asked, "kinfed flower keys on the server")
    host, colon, port = asked.server.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise UsageError(f"--server must be HOST:PORT, such as hub.example.org:8000; got '{asked.server}'")
    for name in ("ca.crt", "key"):
        if keys and not (keys / name).is_file():
            raise UsageError(f"{keys} lacks {name}; it is the folder of this site that kinfed flower keys made")
    link = processes.Link(asked.server, str(keys / "ca.crt") if keys else "")
    key = keys / "key" if keys else None
    processes.node(asked.site, asked.data, asked.target, asked.state, link, key, asked.device, _sayer(console))


def _run(asked: argparse.Namespace, console: Console) -> None:
    _prepare()
    from ..flower import plan, processes

    if (asked.plan is None) == (asked.resume is None):
        raise UsageError("name a FILE.toml to start a run, or the folder of a run with --resume")
    if asked.resume is not None:
        out = asked.resume.resolve()
        if not (out / "config.toml").exists():
            raise UsageError(f"{out} is not a federation's folder: it has no config.toml")
        if (folder := RunFolder(out)).is_finished:
            console.print(f"the run in {out} has finished", soft_wrap=True)
            show(folder.read_summary(), asked, console)
            return
        raw = config.read(str(out / "config.toml"), [])
    else:
        raw = config.read(asked.plan, asked.overrides)
    planned = plan.resolve(raw)
    if asked.resume is None:
        config.warn_of_idle(asked.plan, asked.overrides, [planned.learning.method_name])
    processes.require(Path(asked.home))
    if planned.deployment.graph:
        planned.table["flower"]["graph"] = str(Path(planned.deployment.graph).resolve())
    if asked.resume is None:
        stamp = time.strftime("%Y-%m-%d-%H%M%S")
        out = (asked.out or Path("runs") / planned.learning.method_name / "sites" / stamp).resolve()
        if (out / "config.toml").exists():
            raise UsageError(f"{out} holds a run already; go on with it: kinfed flower run --resume {out}")
        make_folder(out)
        config.write(planned.table, out / "config.toml")
    say = (lambda text: None) if asked.quiet else _sayer(console)
    summary = processes.run(Path(asked.home), planned.table, out, say)
    show(summary, asked, console)
    if each := summary.bytes_per_client_and_round:
        said = f"a client and round took {each['down']:,} bytes down and {each['up']:,} up (bytes.csv)"
        say(f"{said}; models are at sites")


def _revoke(asked: argparse.Namespace, console: Console) -> None:
    _prepare()
    from ..flower import processes

    keys = asked.keys.resolve() if asked.keys else None
    processes.revoke(Path(asked.home), asked.site, keys, _sayer(console))


def _down(asked: argparse.Namespace, console: Console) -> None:
    _prepare()
    from ..flower import processes

    processes.down(Path(asked.home), _sayer(console))


def _prepare() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise UsageError("kinfed flower needs Flower; install it: pip install 'kinfed[flower]'")
    from ..flower import gate

    if problem := gate.untested():
        raise UsageError(problem)
    os.umask(0o077)  # what is made from here on is nobody else's to read


def _keys_or_insecure(asked: argparse.Namespace, maker: str) -> Path | None:
    if asked.insecure and asked.keys:
        raise UsageError("--keys and --insecure exclude each other")
    if not asked.insecure and not asked.keys:
        raise UsageError(f"give --keys DIR, made with {maker}; or --insecure for trials on one machine")
    return None if asked.insecure else asked.keys.resolve()


def _sayer(console: Console) -> Any:
    return lambda text: console.print(text, soft_wrap=True)
