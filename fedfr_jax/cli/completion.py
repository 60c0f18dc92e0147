"""Print a shell's completion script for commands, flags, configs and runs."""

import contextlib
import io
import re

from fedfr_jax.cli.flags import new_parser, parse_flags

ABOUT = """\
Print a script that completes the commands, flags and shipped configs of fedfr.

  bash   fedfr completion bash > ~/.local/share/bash-completion/completions/fedfr
  zsh    fedfr completion zsh > ~/.zfunc/_fedfr   (a folder of $fpath)
  fish   fedfr completion fish > ~/.config/fish/completions/fedfr.fish"""
SHELLS = ("bash", "zsh", "fish")
BASH = """\
_fedfr() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" flag=""
  local before="${{COMP_WORDS[COMP_CWORD-1]}}" flags=""
  if [[ "$word" == "=" ]]; then word=""; flag="$before"
  elif [[ "$before" == "=" ]]; then flag="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
  if [[ "$flag" == "--config" ]]; then
    COMPREPLY=($(compgen -W "{configs}" -- "$word") $(compgen -f -- "$word"))
    return
  fi
  if [[ -n "$flag" ]]; then COMPREPLY=($(compgen -f -- "$word")); return; fi
  if (( COMP_CWORD == 1 )); then
    COMPREPLY=($(compgen -W "{commands}" -- "$word"))
    return
  fi
  case "$command" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$flags" -- "$word") $(compgen -f -- "$word"))
  [[ "${{COMPREPLY[0]}}" == *= ]] && compopt -o nospace
}}
complete -o filenames -F _fedfr fedfr
"""


def main(argv: list[str]) -> None:
    """Run the command on its arguments."""
    parser = new_parser("fedfr completion", ABOUT, epilog="")
    parser.add_argument(
        "shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS)
    )
    shell = parse_flags(parser, argv).shell
    from fedfr_jax.config.files import shipped

    flags, configs = all_flags(), list(shipped())
    print(fish(flags, configs) if shell == "fish" else bash(flags, configs, shell))


def all_flags() -> dict[str, list[str]]:
    """Flags of each command, {command: flags}, from its help."""
    from fedfr_jax.cli.main import COMMANDS, load_command

    flags = {}
    for name in COMMANDS:
        text = io.StringIO()
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(text):
            load_command(name).main(["--help"])
        lines = re.findall(r"^  (?:-h, )?(--[a-z_-]+)(.?)", text.getvalue(), re.M)
        # A space after the flag: it takes a value.
        flags[name] = [flag + "=" * (char == " ") for flag, char in lines]
    return flags


def bash(flags: dict[str, list[str]], configs: list[str], shell: str) -> str:
    """Completion script for bash, also used by zsh."""
    cases = [f'    {name}) flags="{" ".join(x)}" ;;' for name, x in flags.items()]
    script = BASH.format(
        commands=" ".join(flags), configs=" ".join(configs), cases="\n".join(cases)
    )
    if shell == "bash":
        return script
    return f"#compdef fedfr\nautoload -U bashcompinit && bashcompinit\n{script}"


def fish(flags: dict[str, list[str]], configs: list[str]) -> str:
    """Completion script for fish."""
    from fedfr_jax.cli.main import COMMANDS

    first = "complete -c fedfr -n __fish_use_subcommand -f"
    about = {name: COMMANDS[name].replace("'", "\\'") for name in flags}
    lines = [f"{first} -a {name} -d '{text}'" for name, text in about.items()]
    for name, names in flags.items():
        inside = f"complete -c fedfr -n '__fish_seen_subcommand_from {name}'"
        for flag in names:
            values = f" -xa '{' '.join(configs)}'" if flag == "--config=" else ""
            needs = " -r" if flag.endswith("=") and not values else values
            lines.append(f"{inside} -l {flag.strip('-=')}{needs}")
    return "\n".join(lines)
