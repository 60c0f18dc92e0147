"""Rounds one by one and n of them in one call, in one process and in turns.

    python experiments/benchmarks/many_rounds.py [--rounds=10] [--turns=6]

mlp_many of workloads.py; 256 of a million clients with personal rows of 10 x 64 floats,
as in population.py; and 8 of 16 clients of one scalar, as in overhead.py, where nothing
is left but what the host does around a round. A turn is three calls, or their rounds,
until all rows are on disk: rows are written beside what follows. Prints milliseconds a
round, of the fastest turn, and the ratio of the two.
"""

import argparse
import time

import results_file

CALLS = 3  # of a turn


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, help="of a call")
    parser.add_argument("--turns", type=int, default=6, help="of each kind, timed")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    results_file.add_flag(parser)
    return parser.parse_args()


def mlp_many():
    """(simulation, server) of the workload, a client at a time on one device."""
    import ours
    import workloads

    from fedfr_jax.mesh import make_mesh

    work = workloads.WORKLOADS["mlp_many"]
    data = workloads.make_data(work)
    return ours.build(work, data, clients_per_device=1, mesh=make_mesh(1))[:2]


def million():
    """(simulation, server) of small personal rows."""
    import population

    return population.build(10**6, 256, is_virtual=False)


def scalar():
    """(simulation, server) of a model of one number."""
    import overhead

    return overhead.empty(8, 1)[:2]


CASES = {"mlp_many": mlp_many, "million": million, "scalar": scalar}


def measure(sim, server, num_rounds: int, turns: int) -> dict[str, float]:
    """Milliseconds a round, of single ones and of a call."""
    from fedfr_jax.federated.many_rounds import advance
    from fedfr_jax.federated.simulation import open_store

    def play(number, server, store):
        return advance(sim.runs, server, [store], number)

    def play_call(first, server, store):
        return advance(sim.runs, server, [store], first, num_rounds)

    stores, spent = [open_store(sim, server) for _ in range(2)], ([], [])
    servers, of_turn = [server, server], CALLS * num_rounds
    kinds = ((play, 1), (play_call, num_rounds))
    for turn in range(turns + 1):
        rounds = range(turn * of_turn, (turn + 1) * of_turn)
        for kind in (0, 1) if turn % 2 else (1, 0):
            train, step = kinds[kind]
            begin = time.perf_counter()
            for first in rounds[::step]:
                servers[kind], _ = train(first, servers[kind], stores[kind])
            stores[kind].settle()
            spent[kind].append(1e3 * (time.perf_counter() - begin) / of_turn)
    single, call = (min(times[1:]) for times in spent)
    return {"single_ms": single, "call_ms": call, "single_over_call": single / call}


def main():
    args, rows = parse_arguments(), {}
    for name in args.cases:
        row = measure(*CASES[name](), args.rounds, args.turns)
        print(name, {key: round(value, 3) for key, value in row.items()}, flush=True)
        rows[f"{name}, {args.rounds} rounds a call"] = row
    results_file.write(args.out, rows)


if __name__ == "__main__":
    main()
