"""Faults of FedPer's networks, partitions, rows and evaluators."""

from tests.mutants import Mutants

DRAWN = "if method.init_per_client else None"
PASSES = "models/test_forward_passes.py"
STAGES = "tasks/classification/test_stages.py"
MUTANTS = [
    Mutants(
        "fedfr_jax/models/conv.py",
        "models/test_mobilenet.py",
        [
            ("j : j + width : stride", "j : j + width : 1"),
            ("kernel[None, None, i, j]", "kernel[None, None, j, i]"),
        ],
    ),
    Mutants(
        "fedfr_jax/models/mobilenet.py",
        "models/test_mobilenet.py",
        [
            ("(256, 1), (512, 2))", "(256, 1), (512, 1))"),
            ('1 if stem == "cifar" else 2', "2"),
        ],
    ),
    Mutants(
        "fedfr_jax/models/mobilenet.py",
        PASSES,
        [
            ("nn.relu(build_norm(self", "(build_norm(self"),
            ("nn.relu(build_norm(settings, 1)(", "(build_norm(settings, 1)("),
            ("nn.relu(build_norm(settings, 2)(", "(build_norm(settings, 2)("),
        ],
    ),
    Mutants(
        "fedfr_jax/models/small_networks.py",
        PASSES,
        [
            ("nn.relu(_max_pool(x))", "_max_pool(x)"),
            ("nn.relu(fc(x))", "fc(x)"),
            ("rows[:, :, 0:width:2], rows", "rows[:, :, 1:width:2], rows"),
        ],
    ),
    Mutants(
        "fedfr_jax/models/small_networks.py",
        PASSES,
        [
            ("nn.relu(conv(x))", "conv(x)"),
            ("nn.relu(dense(", "(dense("),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/phases.py",
        "federated/test_phases_golden.py",
        [
            ('for moves in (head, "")', 'for moves in ("", head)'),
            ("jnp.where(client.num_steps > 0, steps, 0)", "steps"),
            ("client.batch(step + steps))", "client.batch(step))"),
        ],
    ),
    Mutants(
        "fedfr_jax/data/partition/quantity_skew.py",
        "data/test_partition_quantity.py",
        [
            (
                "np.arange(1.0, count + 1)) ** -skew",
                "np.arange(1.0, count + 1)) ** skew",
            ),
            ("skew * rng.standard_normal", "rng.standard_normal"),
            ("min_examples + np.diff", "np.diff"),
        ],
    ),
    Mutants(
        "fedfr_jax/data/partition/client_partition.py",
        "data/test_partition_classes.py data/test_partition_quantity.py",
        [
            ("np.sort(order[:count])", "order[:count]"),
            ("offsets[clients] - ends[:-1]", "offsets[clients]"),
        ],
    ),
    Mutants(
        "fedfr_jax/data/sources/flickr_aes.py",
        "data/test_flickr_aes.py",
        [
            ("(total <= max_ratings)", "(total <= 2 * max_ratings)"),
            ("fewest >= min_per_score", "fewest >= 1"),
            ("client_ids=workers[rows]", "client_ids=workers[: len(rows)]"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/finetuning.py",
        STAGES,
        [
            ("local_training(local, trainable_pattern)", "local_training(local)"),
            ("if client_variables is not None:", "if False:"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/classification/evaluators.py",
        STAGES,
        [("client_variables=networks.new_client_variables", "")],
    ),
    Mutants(
        "fedfr_jax/tasks/classification/stages.py",
        STAGES,
        [("num_rows=len(parts.train),", "num_rows=len(parts.train) // 2,")],
    ),
    Mutants(
        "fedfr_jax/config/build.py",
        "tasks/classification/test_rows.py",
        [("(num_trained(straggling, cohort_size))", "(cohort_size)")],
    ),
    Mutants(
        "fedfr_jax/federated/aggregation/contract.py",
        "tasks/classification/test_rows.py",
        [("number < whole.min_clients", "False")],
    ),
    Mutants(
        "fedfr_jax/tasks/method_algorithm.py",
        STAGES,
        [(DRAWN, "if False else None")],
    ),
]
