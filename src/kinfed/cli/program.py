"""The program: what all commands share, from its arguments to the exit code."""

import argparse
import logging
import os
import re
import sys
import traceback
import warnings
from typing import Any, NamedTuple, NoReturn

from .. import __version__
from ..core.registry import load
from ..errors import UsageError, explain, hear_warnings, nearest, short
from ..interrupts import catch_signals
from .options import HOW, MORE


class Command(NamedTuple):
    """A command's file, which is imported only if the command runs, and its help."""

    file: str  # in this folder; with dots, a module elsewhere
    help: str

    @property
    def module(self) -> str:
        return self.file if "." in self.file else f"{__package__}.{self.file}"


WRONG_CHOICE = re.compile(r"(?P<where>.*?): invalid choice: (?P<word>'.*') \(choose from (?P<choices>.*)\)", re.DOTALL)
SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")
COMMANDS = {
    "run": Command("run", "train one personalised model per client"),
    "resume": Command("run", "continue an interrupted run"),
    "choose": Command("choose", "find the method and rate that suit your clients"),
    "sweep": Command("sweep", "try combinations of settings, on validation data"),
    "compare": Command("compare", "compare finished runs, or their relations"),
    "explain": Command("explain", "say why one client learns from another"),
    "report": Command("report", "write one HTML page about finished runs"),
    "predict": Command("predict", "predict new rows with the models of a run"),
    "export": Command("export", "write clients' models as ONNX or safetensors"),
    "serve": Command("serve", "serve predictions of a run over HTTP"),
    "onboard": Command("onboard", "give new clients models from a finished run"),
    "flower": Command("kinfed_flower.programs.cli", "run a real federation, a machine per client"),
    "list": Command("list", "list methods, data sets and other parts; look at data"),
    "papers": Command("kinfed_papers.cli.papers", "run a published table again, and analyse its methods"),
}


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, like all other errors."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.set_defaults(parser=self)  # of the innermost command, whose options are meant

    def error(self, message: str) -> NoReturn:
        if wrong := WRONG_CHOICE.match(message):  # in the words of all other errors
            choices = re.findall(r"'([^']*)'", wrong["choices"])
            message = f"{wrong['where'].removeprefix('argument ')}: there is no {wrong['word']}; "
            message += nearest(wrong["word"].strip("'"), choices)
        self.exit(2, f"kinfed: {short(message)}; {self.prog} --help lists the options\n")


def execute(arguments: list[str] | None) -> int:
    """Run a command; returns the exit code, see `kinfed.cli.main`."""
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    parser = parser_of(arguments[0])
    args, rest = parser.parse_known_args(arguments)
    behind = [word for word in rest if "=" in word and not word.startswith("-") and hasattr(args, "overrides")]
    if len(behind) < len(rest):
        strange = [word for word in rest if word not in behind]
        options = [word.partition("=")[0] for word in strange if word.startswith("--")]
        hint = f"; {_suggest_option(args.parser, options[0], hasattr(args, 'overrides'))}" if options else ""
        args.parser.error(f"unrecognized arguments: {' '.join(strange)}{hint}")
    if behind:  # settings after an option
        args.overrides = [*args.overrides, *behind]
    if hasattr(args, "overrides"):
        args.how = [override for override in args.overrides if override.startswith(HOW)]
        args.overrides = [override for override in args.overrides if override not in args.how]
        if args.how and not getattr(args, "carries_out", False):
            args.parser.error(f"settings of how a run is carried out have no meaning here; got '{args.how[0]}'")
        if args.overrides and getattr(args, "only_how", False):
            args.parser.error(
                f"only settings of how it is carried out can change, such as how.executor=loop; got "
                f"'{args.overrides[0]}'"
            )
    from .console import Literal  # imports rich, which help and errors about arguments do not need

    console = Literal(stderr=True)
    if args.debug:  # also what was caught, so that the rest could go on
        logging.basicConfig(format="%(message)s")
        logging.getLogger("kinfed").setLevel(logging.DEBUG)
    reported = set()

    def warn(message: str) -> None:
        kind = re.sub(r"[-\d.]+", "", message)  # it may be repeated every round with other numbers
        if kind not in reported:
            reported.add(kind)
            print(f"kinfed: warning: {message}", file=sys.stderr)

    try:
        with warnings.catch_warnings(), catch_signals():  # so that the process's next command warns again
            hear_warnings(warn)
            args.command(args, console)
        return 0
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, Exception) as problem:
        code, text = explain(problem)
        if args.debug:
            traceback.print_exc()
        print(f"kinfed: {text}".replace("\n", " "), file=sys.stderr)
        return code


def _suggest_option(parser: Any, option: str, has_settings: bool) -> str:
    """The option that may be meant, or the setting of a command that has settings."""
    hint = nearest(option, [name for name in parser._option_string_actions if name.startswith("--")])
    return f"write a setting as {option.lstrip('-')}=VALUE, or {hint}" if has_settings else hint


class _Commands(argparse._SubParsersAction):  # type: ignore[type-arg]
    """The commands, each with its help."""

    def add_parser(self, name: str, **how: Any) -> Any:
        return super().add_parser(name, help=COMMANDS[name].help, **how)


class _Completion(argparse.Action):
    """Prints a script with which a shell completes commands, options and their values."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, shell: Any, option: str | None = None) -> None:
        import shtab

        print(shtab.complete(parser_of(*COMMANDS), shell))
        parser.exit(0)


def parser_of(*chosen: str) -> argparse.ArgumentParser:
    """The parser of the chosen commands; of the others it only has the help."""
    common = argparse.ArgumentParser(add_help=False)
    group = common.add_argument_group(MORE)
    group.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    group.add_argument("--debug", action="store_true", help="show the full traceback of an error")
    parser = _Parser(
        prog="kinfed", description="Graph-guided personalised federated learning: every client learns from its kin."
    )
    parser.add_argument("--version", action="version", version=f"kinfed {__version__}")
    what = f"print a script with which a shell completes commands: {', '.join(SHELLS)}"
    parser.add_argument("--print-completion", choices=SHELLS, action=_Completion, metavar="SHELL", help=what)
    commands = parser.add_subparsers(action=_Commands, required=True, metavar="COMMAND")
    modules = dict.fromkeys(COMMANDS[name].module for name in chosen if name in COMMANDS)
    for name, command in COMMANDS.items():
        if command.module not in modules:
            commands.add_parser(name)
    for module in modules:  # which adds all of its commands
        try:
            load(module).add(commands, common)
        except UsageError as problem:
            parser.exit(2, f"kinfed: {problem}\n")
    return parser
