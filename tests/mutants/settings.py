"""Faults of what refuses a wrong setting before anything is claimed or trained."""

from tests.mutants import Mutants

MISTAKES = "commands/test_mistakes.py"
WRONG = f"{MISTAKES}::test_a_wrong_setting_is_one_line_and_claims_no_folder"
NETWORK = "tasks/test_network.py"
RANGES = "contracts/test_ranges.py"
ROWS = "tasks/classification/test_stages.py::test_a_wrong_row_is_refused_by_its_name"
REID = (
    "tasks/reid/test_stages.py::"
    "test_what_cannot_be_is_refused_before_anything_is_compiled"
)
BELOW_ONE, TO_ONE = '"momentum": BELOW_ONE', '"momentum": (0, 1)'
MUTANTS = [
    Mutants(
        "fedfr_jax/schema.py",
        "test_schema.py",
        [
            ("except OverflowError:", "except ZeroDivisionError:"),
            ("TEXTS = (str, bytes, bytearray)", "TEXTS = (str,)"),
            ("TEXTS = (str, bytes, bytearray)", "TEXTS = (bytes, bytearray)"),
            ("not 0 <= value < 2**32", "not value < 2**32"),
            ("not 0 <= value < 2**32", "not 0 <= value"),
            ('has_kind(int, settings.get("seed"))', '"seed" in settings'),
        ],
    ),
    Mutants(
        "fedfr_jax/schema.py",
        f"{WRONG} {NETWORK}",
        [
            ('check_seed(f"config.{section}.seed", settings["seed"])', "pass"),
            ("if MOST < min(entry, high)", "if MOST < entry"),
        ],
    ),
    Mutants(
        "fedfr_jax/config/build.py",
        f"test_build.py {WRONG}",
        [
            ('    check_literals("config", settings)\n', ""),
            ("frozenset, types.EllipsisType)", "frozenset)"),
            ('isinstance(value, str) and "\\0" in value', "False"),
            ("if not isinstance(key, str):", "if False:"),
            ("value, tuple | list) and not hasattr", "value, tuple) and not hasattr"),
            ('check_seed("config.seed", settings["seed"])', "pass"),
            ('    with naming("config"):', "    if True:"),
        ],
    ),
    Mutants(
        "fedfr_jax/cli/flags.py",
        MISTAKES,
        [
            ("SyntaxError, MemoryError, RecursionError)", "SyntaxError)"),
            ("except UnicodeEncodeError:", "except UnicodeDecodeError:"),
            ("        path.encode()", "        pass"),
            ('    _check_names(f"config.{path}", value)\n', ""),
            ('    _check_names(f"{what}.{name}", inside)', "    pass"),
            ('if not isinstance(name, str) or "." in name:', 'if "." in str(name):'),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/data.py",
        WRONG,
        [
            (
                'check_choice("config.partition.name", settings["name"], '
                "sorted(PARTITIONS))",
                'settings["name"] in PARTITIONS',
            )
        ],
    ),
    Mutants(
        "fedfr_jax/data/partition/quantity_skew.py",
        WRONG,
        [('{"num_clients": (1, MAX_CLIENTS)}', "{}")],
    ),
    Mutants(
        "fedfr_jax/central/settings.py",
        WRONG,
        [("if not milestones and warm >= total:", "if False:")],
    ),
    Mutants(
        "fedfr_jax/models/model_limits.py",
        NETWORK,
        [
            (
                "DEEP, WIDE = (1, 2**12), (1, 2**16)",
                "DEEP, WIDE = (1, 2**12), (0, 2**16)",
            ),
            (
                "DEEP, WIDE = (1, 2**12), (1, 2**16)",
                "DEEP, WIDE = (1, 2**50), (1, 2**16)",
            ),
            (
                "DEEP, WIDE = (1, 2**12), (1, 2**16)",
                "DEEP, WIDE = (1, 2**12), (1, 2**15)",
            ),
            ('"blocks": (0, DEEP[1])', '"blocks": DEEP'),
            ('    "norm_groups": WIDE,\n', ""),
            ('    "hidden_dim": WIDE,\n', ""),
            ('settings.get("encoder"))', "None)"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/model.py",
        NETWORK,
        [
            ('    check_layers("model", settings)\n', ""),
            ("if isinstance(dtype, str | type | jnp.dtype):", "if True:"),
            ("(TypeError, ValueError, SyntaxError)", "(TypeError, ValueError)"),
            ("(TypeError, ValueError, SyntaxError)", "(TypeError, SyntaxError)"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/faces/distillation.py",
        "tasks/faces/test_distilled.py::test_a_teacher_that_does_not_fit_is_refused",
        [
            (
                'check_layers("distill.teacher.model", settings.get("model"))',
                "pass",
            )
        ],
    ),
    Mutants("fedfr_jax/federated/local.py", RANGES, [(BELOW_ONE, TO_ONE)]),
    Mutants(
        "fedfr_jax/federated/algorithms/server_optimizers.py",
        RANGES,
        [(BELOW_ONE, TO_ONE)],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/mime.py",
        RANGES,
        [('"server_momentum": BELOW_ONE', '"server_momentum": (0, 1)')],
    ),
    Mutants("fedfr_jax/tasks/faces/option_ranges.py", WRONG, [(BELOW_ONE, TO_ONE)]),
    Mutants(
        "fedfr_jax/tasks/row_keys.py",
        ROWS,
        [('check_kinds(f"config.{section}.", own,', 'str(("", own,')],
    ),
    Mutants(
        "fedfr_jax/tasks/reid/methods.py",
        REID,
        [('call(f"methods.{name}", Batches, own)', "Batches(**own)")],
    ),
    Mutants(
        "fedfr_jax/tasks/reid/evaluator.py",
        f"tasks/reid/test_judge.py {REID}",
        [
            ("local_training: Mapping | None = (", 'local_training: "Mapping" = ('),
            ("if not evaluating.ranks:", "if False:"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/reid/loss.py",
        REID,
        [('        numbers["triplet_margin"] = triplet_margin\n', "        pass\n")],
    ),
]
