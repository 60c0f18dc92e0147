"""Contributions of clients: replays of a run without them.

Leave-one-out is exact: the same rounds without the client. Shapley values are the mean
over permutations of what a client adds to those before it, by truncated Monte Carlo
(Ghorbani and Zou 2019, arXiv:1904.02868, algorithm 1), or exact over all permutations.
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedfr_jax import trees
from fedfr_jax.api import RunState, run_rounds
from fedfr_jax.federated.replay import Member, Replayer
from fedfr_jax.federated.simulation import open_store
from fedfr_jax.federated.unlearning import Subtraction
from fedfr_jax.ranges import Count, NonNegative, Seed, Whole
from fedfr_jax.schema import checked, hint

LEVEL = 0.95  # of intervals
Value = Callable[[RunState], float]
Ids = np.ndarray  # [n] int64 numbers of clients


class Contribution(NamedTuple):
    """A contribution; its 95 % interval over permutations, none if all were taken."""

    value: float
    low: float
    high: float


class Unlearned(NamedTuple):
    """A run that has forgotten clients approximately, and how far that went."""

    run: RunState
    distance: float  # of its variables from those of the exact reference, L2
    distance_before: float  # of the run with all clients from the reference


class Replay:
    """A run's rounds again, with all clients and without some of them."""

    def __init__(
        self, run: RunState, num_rounds: int, players: Mapping[Hashable, Ids], size: int
    ):
        """Keep the run before its first round; `train` trains members of it.

        Args:
          players: name -> ids of the clients that are left out together.
          size: most members that train at once.
        """
        self._run, self.players = run, dict(players)
        count = len(players) + 1
        size = -(-count // -(-count // size))  # groups are equally large
        self._replayer = Replayer(run.sim, run.server, num_rounds, size)
        self.all: RunState = run
        self.without: dict[Hashable, RunState] = {}

    def train(self) -> "Replay":
        """Train the member with all clients, and one without each player."""
        _, *others = self.runs()
        self.without = dict(zip(self.players, others, strict=True))
        return self

    def runs(self) -> Iterator[RunState]:
        """Train and yield `all`, then the run without each player, which is not kept.

        So that memory holds as many models as train at once, however many players.
        """
        members = self._members([(), *([name] for name in self.players)])
        self.all = next(members)
        yield self.all
        yield from members

    def leave_one_out(self, value: Value) -> dict[Hashable, float]:
        """Value of the run minus that of the run without each player.

        Args:
          value: of a run after its rounds, such as an accuracy.
        """
        whole = float(value(self.all))
        return {name: whole - float(value(x)) for name, x in self.without.items()}

    @checked
    def shapley(
        self,
        value: Value,
        *,
        permutations: Count = 64,
        tolerance: NonNegative = 0.0,
        seed: Seed = 0,
    ) -> dict[Hashable, Contribution]:
        """Estimate each player's Shapley value; other clients are always there.

        If the players have no more permutations than `permutations`, all are taken, and
        with tolerance 0 the values are exact: they add up to value(all) - value(without
        any player).

        Args:
          permutations: sampled by `seed`; intervals are of their standard error.
          tolerance: a permutation ends where |value(all) - value(players so far)| is
            smaller, and the players to come get 0 in it: a bias, which intervals do
            not have.
        """
        names, known = list(self.players), {}
        check_disjoint(self.players)
        orders = sample_orders(len(names), permutations, seed)
        everyone = frozenset(range(len(names)))
        known[everyone] = float(value(self.all))

        def values_of(sets: list[frozenset]) -> list[float]:
            missing = [x for x in dict.fromkeys(sets) if x not in known]
            left_out = [[names[i] for i in everyone - x] for x in missing]
            for players, run in zip(missing, self._members(left_out), strict=True):
                known[players] = float(value(run))
            return [known[x] for x in sets]

        margins = marginal_values(values_of, orders, known[everyone], tolerance)
        is_whole = len(orders) == math.factorial(len(names))
        return dict(zip(names, summarize(margins, is_whole), strict=True))

    @checked
    def unlearn(
        self,
        name: Hashable,
        num_rounds: Whole = 1,
        *,
        reference: RunState | None = None,
    ) -> Unlearned:
        """Unlearn a player by subtraction, see `federated.unlearning`; score it.

        Args:
          num_rounds: trained without the player after its updates are subtracted.
          reference: the run that has never seen the player, as `runs` gave it; None
            takes `without[name]`.
        """
        if name not in self.players:
            raise ValueError(
                f"name must be one that the replay left out, of {[*self.players]}, got "
                f"{name!r}."
            )
        reference = reference or self.without[name]
        server = self._subtraction.without(self.players[name])
        run = reference._replace(server=server, store=open_store(reference.sim, server))
        for _ in range(num_rounds):
            run, _ = run_rounds(run, 1)
        return Unlearned(run, distance(run, reference), distance(self.all, reference))

    def check_unlearning(self) -> None:
        """Raise ValueError for a run of which `unlearn` cannot subtract updates."""
        self._subtraction.check()

    @functools.cached_property
    def _subtraction(self) -> Subtraction:
        run = self._run
        return Subtraction(run.sim, run.variables, self._replayer.num_rounds)

    def _members(self, sets: Sequence[Sequence[Hashable]]) -> Iterator[RunState]:
        """Yield the run after its rounds, without the players of each set."""
        nobody = np.zeros(0, np.int64)
        excluded = [
            np.unique(np.concatenate([nobody, *(self.players[x] for x in names)]))
            for names in sets
        ]
        for member in self._replayer.train(excluded):
            yield self._state(member)

    def _state(self, member: Member) -> RunState:
        return self._run._replace(
            **member._asdict(), round_number=self._replayer.num_rounds
        )


@checked
def replay(
    run: RunState,
    num_rounds: Count,
    without: Sequence[Hashable],
    *,
    groups: Mapping[str, Sequence[Hashable]] | None = None,
    members: Count = 16,
) -> Replay:
    """Train a run's rounds again, each time without a client or group of clients.

    The cohorts, batches and keys are those of the run; who is left out has weight 0.
    Counted are the numbers of a deterministic run, not an approximation of them.

    Args:
      run: as `init` gives it, before its first round.
      without: clients, as the data names them, and names of groups.
      groups: name -> clients of the group.
      members: most that train at once; each has a server and client states.

    Returns:
      A `Replay`: `all` is the run with all clients, `without[name]` that without one.

    Raises:
      ValueError: for an unknown client or group, one that is the whole population, and
        a run that has trained, or that cannot be trained as members of one program.
    """
    if run.round_number:
        raise ValueError(
            "a replay needs a run before its first round, got one after round "
            f"{run.round_number}. Give what ff.init returned."
        )
    players = find_players(without, groups or {}, run.clients)
    return Replay(run, num_rounds, players, members).train()


def distance(a: RunState, b: RunState) -> float:
    """L2 distance of the global models' parameters."""
    params = a.variables["params"], b.variables["params"]
    return float(trees.norm(jax.tree.map(lambda x, y: x - y, *params)))


def find_players(
    names: Sequence[Hashable],
    groups: Mapping[Any, Sequence[Hashable]],
    clients: np.ndarray | range,
) -> dict[Hashable, Ids]:
    """Find the ids [n] of clients and groups that are left out.

    Args:
      clients: [N] names of the clients, whose ids are their places.
    """
    ids = {x: i for i, x in enumerate(np.asarray(clients).tolist())}
    if both := [name for name in groups if name in ids]:
        raise ValueError(f"a group must not have a client's name, got {both[0]!r}.")
    players = [] if isinstance(names, str) else list(names)
    if not players or not all(isinstance(x, Hashable) for x in players):
        raise ValueError(
            f"without must be a list of clients and groups, got {names!r}."
        )
    found = {}
    for name in players:
        in_group = groups[name] if name in groups else [name]
        unknown = [x for x in in_group if x not in ids]
        if unknown:
            what = f"group {name!r}" if name in groups else "without"
            known = [str(x) for x in (*groups, *itertools.islice(ids, 10_000))]
            raise ValueError(
                f"clients of {what} must be among the run's {len(ids)}, got "
                f"{unknown[0]!r}{hint(str(unknown[0]), known)}."
            )
        found[name] = np.unique([ids[x] for x in in_group]).astype(np.int64)
        if not 0 < len(found[name]) < len(ids):
            raise ValueError(
                f"{name!r} must leave out some of the {len(ids)} clients and keep "
                f"others, got {len(found[name])} of them."
            )
    return found


def check_disjoint(players: Mapping[Hashable, Ids]) -> None:
    """Raise ValueError for a client of two players, who has no place of its own."""
    ids, count = np.unique(np.concatenate([*players.values()]), return_counts=True)
    if (count > 1).any():
        raise ValueError(
            "players of Shapley values must share no client, got client number "
            f"{ids[count.argmax()]} in several. Leave out one of them."
        )


def sample_orders(num_players: int, count: int, seed: int) -> np.ndarray:
    """Permutations of players: [M, n], all of them if they are at most `count`."""
    if math.log(count) >= math.lgamma(num_players + 1) - 1e-9:
        return np.array([*itertools.permutations(range(num_players))])
    keys = jax.random.split(jax.random.key(seed), count)
    shuffle = lambda key: jax.random.permutation(key, num_players)
    return np.asarray(jax.vmap(shuffle)(keys))


def marginal_values(
    values_of: Callable[[list[frozenset]], list[float]],
    orders: np.ndarray,
    whole: float,
    tolerance: float,
) -> np.ndarray:
    """What each player adds to those before it, [M, n] by permutation and player.

    The permutations go from place to place together, so that many sets of players are
    asked for at once.

    Args:
      values_of: sets of players -> their values.
      orders: [M, n] permutations.
      whole: value of all players.
    """
    margins = np.zeros(orders.shape)
    before = np.full(len(orders), values_of([frozenset()])[0])
    for place in range(orders.shape[1]):
        walking = np.flatnonzero(~(np.abs(whole - before) < tolerance))
        sets = [frozenset(orders[m, : place + 1].tolist()) for m in walking]
        now = np.array(values_of(sets))
        margins[walking, orders[walking, place]] = now - before[walking]
        before[walking] = now
    return margins


def summarize(margins: np.ndarray, is_whole: bool) -> list[Contribution]:
    """Mean over permutations of margins [M, n], with Student's intervals.

    Args:
      is_whole: these are all permutations, whose mean has no error of sampling.
    """
    from scipy.stats import t

    count, mean = len(margins), margins.mean(0)
    half = np.zeros_like(mean)
    if not is_whole:
        error = margins.std(0, ddof=1) / np.sqrt(count) if count > 1 else np.inf
        half = t.ppf((1 + LEVEL) / 2, max(count - 1, 1)) * error + half
    rows = zip(mean, mean - half, mean + half, strict=True)
    return [Contribution(*map(float, row)) for row in rows]
