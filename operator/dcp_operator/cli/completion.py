"""`dcpctl completion`: completion scripts for shells, made from the parser itself.

Generated here rather than by a library: what has to be completed is one level of commands with plain options, and the
operator image would carry the library for nothing else.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dcp_operator.rules import rule_ids

_BASH: Final = """\
# bash completion for {program}; load it with: source <({program} completion bash)
_{function}() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}"
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    case "$command $before" in
{values}
    esac
    case "$command" in
{options}
    esac
}}
complete -o default -F _{function} {program}
"""
_ZSH: Final = """\
#compdef {program}
# zsh completion for {program}; load it with: source <({program} completion zsh)
autoload -Uz bashcompinit && bashcompinit
{bash}"""
_FISH_HEADER: Final = "# fish completion for {program}; load it with: {program} completion fish | source\n"


@dataclass(frozen=True, slots=True)
class _Option:
    """One option or argument of a command; `names` is empty for an argument."""

    names: tuple[str, ...]
    choices: tuple[str, ...]
    takes_file: bool
    help: str


def completion_script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the script for one of SHELLS."""
    return _WRITERS[shell](parser.prog, {name: list(_options(each)) for name, each in _commands(parser).items()})


def _commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    # argparse has no public way to ask what was added to a parser; its tables are the same in every Python.
    found: Any = next(action for action in parser._actions if isinstance(action.choices, dict))  # pyright: ignore[reportPrivateUsage]
    return found.choices


def _options(parser: argparse.ArgumentParser) -> Iterable[_Option]:
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage] - see above
        choices = tuple(map(str, action.choices or ()))
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        if metavar == "RULE":
            choices = tuple(rule_ids())
        yield _Option(tuple(action.option_strings), choices, metavar == "FILE", (action.help or "").partition(";")[0])


def _bash(program: str, commands: Mapping[str, list[_Option]]) -> str:
    values: list[str] = []
    options: list[str] = []
    for name, known in commands.items():
        for option in known:
            if option.names and (option.choices or option.takes_file):
                reply = f'COMPREPLY=($(compgen -W "{" ".join(option.choices)}" -- "$word"))' if option.choices else ""
                places = "|".join(f'"{name} {each}"' for each in option.names)
                values.append(f"        {places}) {reply or 'COMPREPLY=()'}; return ;;")
        words = [word for option in known for word in (option.names or option.choices)]
        options.append(f'        {name}) COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word")) ;;')
    return _BASH.format(
        program=program,
        function=program.replace("-", "_"),
        commands=" ".join([*commands, "--version", "--help"]),
        values="\n".join(values),
        options="\n".join(options),
    )


def _zsh(program: str, commands: Mapping[str, list[_Option]]) -> str:
    return _ZSH.format(program=program, bash=_bash(program, commands))


def _fish(program: str, commands: Mapping[str, list[_Option]]) -> str:
    lines = [
        f"complete -c {program} -f -n __fish_use_subcommand -a '{' '.join(commands)}'",
        f"complete -c {program} -f -n __fish_use_subcommand -l version -d 'print the version and exit'",
    ]
    for name, known in commands.items():
        condition = f"complete -c {program} -n '__fish_seen_subcommand_from {name}'"
        for option in known:
            flags = " ".join(f"-l {each[2:]}" if each.startswith("--") else f"-s {each[1:]}" for each in option.names)
            values = f"-x -a '{' '.join(option.choices)}'" if option.choices else "-r" if option.takes_file else "-f"
            text = option.help.replace("'", "")
            lines.append(" ".join(part for part in (condition, flags, values, f"-d '{text}'" if text else "") if part))
    return _FISH_HEADER.format(program=program) + "".join(f"{line}\n" for line in lines)


_WRITERS: Final[dict[str, Callable[[str, Mapping[str, list[_Option]]], str]]] = {
    "bash": _bash,
    "fish": _fish,
    "zsh": _zsh,
}
SHELLS: Final = tuple(_WRITERS)
