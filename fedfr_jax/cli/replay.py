"""Train a run again without some of its clients: exact contributions, unlearning."""

import pathlib
from collections.abc import Mapping, Sequence

from fedfr_jax.cli.flags import DataChanged
from fedfr_jax.json_files import read_json


def replay(
    run: str,
    *,
    without: list[str],
    group: list[str] | None = None,
    method: str | None = None,
    metric: str = "",
    shapley: int = 0,
    tolerance: float = 0.0,
    unlearn: int | None = None,
    members: int = 16,
    data_changed: DataChanged = None,
) -> None:
    """Train a run's rounds again without some clients, and show what they contribute.

    Rounds are deterministic: with the same cohorts, batches and keys, and weight 0 for
    the clients left out, the numbers are those of a run without them. All members
    train together. The contribution is the run's metric minus that without the clients;
    replay.json, replay.svg, .png and .pdf go to RUN/<method>/replay.

      fedfr replay runs/a --without=client:17 --without=client:3
      fedfr replay runs/a --group=north=0-9,12 --without=group:north --unlearn=2
      fedfr replay runs/a '--without=client:*' --shapley=32 --tolerance=0.01

    Args:
      run: RUN run directory, whose data are where its config says
      without: PLAYER client:NUMBER, client:NAME (a name comes first where it is a
        number), client:* for every client, or group:NAME; may be repeated
      group: NAME=IDS clients of a group, such as north=0-9,12, or a JSON file {name:
        [clients]}; may be repeated
      method: METHOD method of the run (default the last)
      metric: METRIC as evaluator/metric (default the first)
      shapley: N permutations that Shapley values are estimated from; all of them, and
        the values exact, if the players have no more
      tolerance: T end a permutation when its clients are worth all within T
      unlearn: N subtract the players' updates, train N rounds without them, and compare
        with the exact run without them
      members: N runs that train together
    """
    from fedfr_jax.cli.contributions import (
        Options,
        check_options,
        open_trained,
        write_replay,
    )
    from fedfr_jax.counterfactual import Replay, find_players
    from fedfr_jax.files import is_url
    from fedfr_jax.runs.locks import lock_to_read

    folder = pathlib.Path(run)
    if is_url(run):
        raise ValueError(f"RUN must be a folder of this machine, got {run}.")
    if not members:
        raise ValueError("--members must be at least 1, got 0.")
    with lock_to_read(folder):
        trained = open_trained(folder, method, data_changed)
        names, count = trained.client_names, trained.run.sim.population.num_clients
        groups = {}
        for text in group or ():
            groups |= parse_group(text, names, count)
        wanted = [
            x for text in without for x in parse_player(text, groups, names, count)
        ]
        players = find_players(wanted, groups, range(count))
        options = Options(metric, shapley, tolerance, unlearn)
        replayed = Replay(trained.run, trained.num_rounds, players, members)
        check_options(trained, replayed, options)
        write_replay(trained, replayed, options)


def parse_player(
    text: str, groups: Mapping[str, list], names: Sequence[str], count: int
) -> list:
    """Parse client:NUMBER, client:NAME, client:* (`count` clients) or group:NAME."""
    kind, _, name = text.partition(":")
    if kind == "client" and name == "*":
        return [*range(count)]
    if kind == "client" and name:
        return [client_number(name, names)]
    if kind == "group" and name in groups:
        return [name]
    raise ValueError(
        "--without must be client:NUMBER, client:NAME, client:* or group:NAME of one "
        f"of the groups {[*groups]}, got {text!r}."
    )


def client_number(word: str, names: Sequence[str]) -> int | str:
    """Number of a client, by its number or its name; an unknown name as it is."""
    if word in names:
        return [*names].index(word)
    return int(word) if word.isdecimal() else word


def parse_group(text: str, names: Sequence[str], count: int) -> dict[str, list]:
    """Parse NAME=IDS, or read a JSON file of {name: [clients]}.

    >>> parse_group("north=0-2,7", (), 10)
    {'north': [0, 1, 2, 7]}
    """
    name, equals, ids = text.partition("=")
    if text.endswith(".json"):
        found = read_json(text)
        if bad := [name for name, x in found.items() if not isinstance(x, list)]:
            raise ValueError(
                f"{text} must be an object of lists of clients, got {found[bad[0]]!r} "
                f"for {bad[0]!r}."
            )
        return {k: [client_number(str(x), names) for x in v] for k, v in found.items()}
    if not equals:
        raise ValueError(f"--group must be NAME=IDS or a JSON file, got {text!r}.")
    clients: list = []
    for word in filter(None, ids.split(",")):
        first, dash, last = word.partition("-")
        if word not in names and dash and first.isdecimal() and last.isdecimal():
            clients += range(int(first), min(int(last), count) + 1)
        else:
            clients.append(client_number(word, names))
    return {name: clients}
