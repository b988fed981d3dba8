"""kinfed completion: a script that needs no Python when a key is pressed."""

import argparse
import shlex
from typing import Any

from rich.console import Console

Words = dict[str, list[str]]  # what may come, by the words before it that decide

BASH = """_kinfed() {
  local word="${COMP_WORDS[COMP_CWORD]}" path="" words="" i
  for ((i = 1; i < COMP_CWORD && i < 3; i++)); do
    case " %(groups)s " in *" $path${COMP_WORDS[i]} "*) path="$path${COMP_WORDS[i]} " ;; *) break ;; esac
  done
  case "$path${COMP_WORDS[COMP_CWORD-1]}" in
%(values)s
    *) case "${path%% }" in
%(options)s
    esac ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -o bashdefault -F _kinfed kinfed
"""


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    completion = commands.add_parser(
        "completion",
        parents=[common],
        description="Print a script with which a shell completes kinfed's commands, options and their values.",
        epilog="once: kinfed completion bash > ~/.kinfed-completion; echo . ~/.kinfed-completion >> ~/.bashrc; with "
        "zsh and ~/.zshrc; kinfed completion fish > ~/.config/fish/completions/kinfed.fish",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    completion.set_defaults(command=_completion)


def _completion(args: argparse.Namespace, console: Console) -> None:
    from .program import COMMANDS, parser_of

    options: Words = {"": list(COMMANDS)}
    values: Words = {}
    for name in COMMANDS:
        _gather(_of(parser_of(name), name), name, options, values)
    if args.shell == "fish":
        print(_fish(options, values))
        return
    if args.shell == "zsh":
        print("autoload -U +X compinit bashcompinit && compinit && bashcompinit")
    print(
        BASH
        % {
            "groups": " ".join(path for path in options if path),
            "values": _cases(values),
            "options": _cases(options),
        },
        end="",
    )


def _of(parser: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser:
    """The parser of a command."""
    (inner,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    return inner.choices[name]  # type: ignore[no-any-return]


def _gather(parser: argparse.ArgumentParser, path: str, options: Words, values: Words) -> None:
    options[path] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            options[path] += action.choices
            for name, inner in action.choices.items():
                _gather(inner, f"{path} {name}", options, values)
            continue
        options[path] += [option for option in action.option_strings if option.startswith("--")]
        for option in action.option_strings or [""]:
            if action.choices and option:
                values[f"{path} {option}"] = [str(choice) for choice in action.choices]
            elif action.choices:
                options[path] += [str(choice) for choice in action.choices]


def _cases(words: Words) -> str:
    return "\n".join(f"    {shlex.quote(path)}) words={shlex.quote(' '.join(may))} ;;" for path, may in words.items())


def _fish(options: Words, values: Words) -> str:
    lines = []
    for path, words in options.items():
        seen = " && ".join(f"__fish_seen_subcommand_from {word}" for word in path.split()) or "__fish_use_subcommand"
        plain = [word for word in words if not word.startswith("--")]
        if plain:
            lines.append(f"complete -c kinfed -n '{seen}' {'-f ' * (not path)}-a '{' '.join(plain)}'")
        for option in (word for word in words if word.startswith("--")):
            may = values.get(f"{path} {option}", [])
            more = f" -x -a '{' '.join(may)}'" if may else ""
            lines.append(f"complete -c kinfed -n '{seen}' -l {option[2:]}{more}")
    return "\n".join(lines)
