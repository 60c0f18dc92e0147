"""Commands that list what there is: describe, configs, completion."""

import argparse
import ast
import inspect
import pathlib
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ml_collections import ConfigDict

import fedfr_jax as ff
from fedfr_jax.cli import flags
from fedfr_jax.config.files import shipped
from fedfr_jax.schema import check_choice, hint

if TYPE_CHECKING:
    from fedfr_jax.tasks.experiment import TaskSpec

WIDTH = 88


def describe(
    family: str | None = None,
    member: str | None = None,
    *,
    config: ConfigDict | None = None,
    typed: Sequence[str],
) -> None:
    """List the models, sources, algorithms, losses, ... of configs.

    The members of a family are listed, each with its settings (the keys of a config and
    their defaults) and one line; with a member's name its whole documentation, without
    a family all names. The library itself passes input_shape, labels, cosine, local,
    loss, model, task, mesh, seen and num_classes. "sections" lists the keys of the
    config's sections federation, pretrain, evaluation and of a method. "scenarios" are
    the partitions of reid, "encoders" those of the segmenter. Settings of "algorithms"
    go below a method's key algorithm: {"name": ..., key: value}; "aggregation" and
    "attacks" are for its keys aggregation and attack, "server_optimizers" for that key
    of an algorithm. "variants" are methods of the literature that are settings of
    another: the keys of each.

    With a config's file, or --config=NAME, print what each of its methods sends, in
    both directions, and who sees it. Nothing is trained or read.

    Args:
      family: FAMILY models, encoders, sources, partitions, scenarios, algorithms,
        aggregation, attacks, server_optimizers, losses, tasks, augments, sections or
        variants; or the file of a config
      member: MEMBER of the family
    """
    if family and re.search(r"/|\.py\b", family):
        parser = flags.new_parser("fedfr describe", "")
        flags.define(parser)
        config = flags.parse(parser, [f"--config={family}", *typed[2:]]).config
    if config is not None:
        return print_disclosures(config)
    families = load_families()
    if family is None:
        for name, members in families.items():
            text = f"{name}: {', '.join(sorted(members))}"
            print(textwrap.fill(text, WIDTH, subsequent_indent=" " * 4))
    elif family not in families and member is None:
        for name in _families_with(family, families):
            print_members(name, families[name], family)
    else:
        check_choice("describe: family", family, families)
        print_members(family, families[family], member)


def print_members(family: str, members: Mapping, name: str | None) -> None:
    """Print a line for each member of a family, or the documentation of one."""
    if name is not None:
        check_choice("describe: member", name, sorted(members))
    if family == "variants":
        shown = members if name is None else {name: members[name]}
        for variant, (settings, text) in shown.items():
            print(f'"{variant}": {settings}\n    {text}')
    elif name is None:
        for key, member in sorted(members.items()):
            print(f"{signature_text(key, member)}\n    {summary(member)}")
    else:
        member = members[name]
        print(f"{signature_text(name, member)}\n\n{documentation(member)}")


def print_disclosures(config: ConfigDict | Mapping) -> None:
    """Print what the clients of each federated method of a config send."""
    from fedfr_jax.cli.plan import use_virtual
    from fedfr_jax.federated.disclosure import format_disclosure
    from fedfr_jax.plan.dummy_inputs import blind_experiment
    from fedfr_jax.runs.shapes import disclose_stage

    use_virtual(1)
    experiment = blind_experiment(config)
    for name in experiment.stages:
        if disclosure := disclose_stage(experiment, name):
            print(format_disclosure(name, disclosure), end="\n\n", flush=True)


def _families_with(name: str, families: Mapping[str, Mapping]) -> list[str]:
    """Families with a member `name`, to find it without its family."""
    if matches := [family for family, members in families.items() if name in members]:
        return matches
    every = [*families, *(name for members in families.values() for name in members)]
    raise ValueError(
        f"describe: family must be one of {list(families)} or a member of one, got "
        f"{name!r}{hint(name, every)}."
    )


def signature_text(name: str, function: "Callable | TaskSpec") -> str:
    """Format `name(key, key=default, ...)` in lines of at most WIDTH characters."""
    if not callable(function):
        return name
    parameters = [
        key if parameter.default is parameter.empty else f"{key}={_text(parameter)}"
        for key, parameter in inspect.signature(function).parameters.items()
    ]
    return textwrap.fill(
        f"{name}({', '.join(parameters)})",
        WIDTH,
        subsequent_indent=" " * 8,
        break_long_words=False,
        break_on_hyphens=False,
    )


def summary(function: "Callable | TaskSpec") -> str:
    """First line of a docstring, or a task's."""
    if not callable(function):
        return function.summary
    return (inspect.getdoc(function) or "").partition("\n")[0]


def documentation(function: "Callable | TaskSpec") -> str:
    """Docstring of a function; for a NamedTuple its fields with their comments."""
    if not callable(function):
        return function.summary
    if not hasattr(function, "_fields"):
        return inspect.getdoc(function) or ""
    source = re.split(r"    @property|    def ", inspect.getsource(function))[0]
    return textwrap.dedent(source.partition('"""\n\n')[2]).rstrip()


def _text(parameter: inspect.Parameter) -> str:
    """Default of a parameter as text; of a function its name."""
    default = parameter.default
    return default.__name__ if inspect.isroutine(default) else repr(default)


def load_families() -> dict[str, Mapping[str, Any]]:
    """Members of each family, imported here, as most of them import JAX."""
    from fedfr_jax.federated.algorithms.fedavg import SERVER_OPTIMIZERS
    from fedfr_jax.models.segmenter import ENCODERS
    from fedfr_jax.tasks.methods import VARIANTS
    from fedfr_jax.tasks.reid.data import SCENARIOS

    return {
        "models": ff.MODELS,
        "encoders": ENCODERS,
        "sources": ff.SOURCES,
        "partitions": ff.PARTITIONS,
        "scenarios": SCENARIOS,
        "algorithms": ff.ALGORITHMS,
        "aggregation": ff.AGGREGATORS,
        "attacks": ff.ATTACKS,
        "adapters": ff.ADAPTERS,
        "server_optimizers": SERVER_OPTIMIZERS,
        "losses": ff.LOSSES,
        "tasks": ff.TASKS,
        "augments": ff.AUGMENTS,
        "sections": _sections(),
        "variants": VARIANTS,
    }


def _sections() -> Mapping[str, Callable]:
    from fedfr_jax.central.settings import Training
    from fedfr_jax.federated.settings import Federation
    from fedfr_jax.tasks import TASKS
    from fedfr_jax.tasks.classification import class_pull
    from fedfr_jax.tasks.faces.methods import FaceTerms
    from fedfr_jax.tasks.methods import Method, with_contrastive_loss
    from fedfr_jax.tasks.reid.data import PublicDataConfig

    found = {
        "federation": Federation,
        "partition.public": PublicDataConfig,  # of reid
        "pretrain": Training,  # and methods of kind central
        "methods": Method,
        "methods.algorithm.fedfr": FaceTerms,  # of faces
        "methods.algorithm.fedaws": class_pull,
        "methods.algorithm.moon": with_contrastive_loss,
    }
    for task, spec in TASKS.items():
        found[f"evaluation.{task}"] = spec.sections["evaluation"]
        if hasattr(spec.methods.loss, "own"):  # unlike a margin loss
            found[f"methods.loss.{task}"] = spec.methods.loss.own
    return found


def configs() -> None:
    """List the configs that come with the library.

    --config takes a name, or only its last part. Your own Python file starts with `from
    fedfr_jax.configs import base`.
    """
    files = shipped()
    width = max(map(len, files), default=0)
    for name, path in files.items():
        print(f"{name:{width}}  {headline(path)}")


def headline(path: pathlib.Path) -> str:
    """First line of a Python file's docstring, without running the file."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.partition("\n")[0]


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


def completion(shell: Literal["bash", "zsh", "fish"]) -> None:
    """Print a shell's completion of commands and flags.

      bash   fedfr completion bash > ~/.local/share/bash-completion/completions/fedfr
      zsh    fedfr completion zsh > ~/.zfunc/_fedfr   (a folder of $fpath)
      fish   fedfr completion fish > ~/.config/fish/completions/fedfr.fish

    Args:
      shell: SHELL bash, zsh or fish
    """
    known, names = all_flags(), list(shipped())
    print(fish(known, names) if shell == "fish" else bash(known, names, shell))


def all_flags() -> dict[str, list[str]]:
    """Flags of each command, {command: flags}, from its help."""
    from fedfr_jax.cli.main import COMMANDS, load_command

    known = {}
    for name in COMMANDS:
        parser = flags.build_parser(f"fedfr {name}", load_command(name))
        options = [x for x in parser._actions if x.help != argparse.SUPPRESS]
        known[name] = [
            option.option_strings[-1] + "=" * (option.nargs is None)
            for option in options
            if option.option_strings
        ]
    return known


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
    from fedfr_jax.cli.main import about_command

    first = "complete -c fedfr -n __fish_use_subcommand -f"
    about = {name: about_command(name).replace("'", "\\'") for name in flags}
    lines = [f"{first} -a {name} -d '{text}'" for name, text in about.items()]
    for name, names in flags.items():
        inside = f"complete -c fedfr -n '__fish_seen_subcommand_from {name}'"
        for flag in names:
            values = f" -xa '{' '.join(configs)}'" if flag == "--config=" else ""
            needs = " -r" if flag.endswith("=") and not values else values
            lines.append(f"{inside} -l {flag.strip('-=')}{needs}")
    return "\n".join(lines)
