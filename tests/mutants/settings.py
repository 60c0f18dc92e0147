"""Faults of what refuses a wrong setting before anything is claimed or trained."""

from tests.mutants import Mutants

MISTAKES = "cli/test_mistakes.py"
WRONG = f"{MISTAKES}::test_a_wrong_setting_is_one_line_and_claims_no_folder"
NETWORK = "tasks/test_network.py"
RANGES = "contracts/test_ranges.py"
ROWS = "tasks/classification/test_stages.py::test_a_wrong_row_is_refused_by_its_name"
REID = (
    "tasks/reid/test_stages.py::"
    "test_what_cannot_be_is_refused_before_anything_is_compiled"
)
MIMELITE = "def mimelite(\n    local: LocalTraining,\n    *,\n    server_"
BELOW_ONE, ANY = "momentum: BelowOne", "momentum: NonNegative"
MUTANTS = [
    Mutants(
        "fedfr_jax/schema.py",
        "test_schema.py",
        [
            ("strict=True, allow_inf_nan=False", "strict=True"),
            ("strict=True, allow_inf_nan=False", "allow_inf_nan=False"),
            ('startswith(("greater_", "less_", "too_"))', 'startswith("less_")'),
            ('return "" if _takes_floats(kind) else', 'return "" if True else'),
            ("TEXTS = (str, bytes, bytearray)", "TEXTS = (str,)"),
            ("TEXTS = (str, bytes, bytearray)", "TEXTS = (bytes, bytearray)"),
        ],
    ),
    Mutants(
        "fedfr_jax/ranges.py",
        f"test_schema.py {WRONG} {NETWORK}",
        [
            ("Seed = Annotated[int, Interval(ge=0, lt=2**32)]", "Seed = int"),
            ("Whole = Annotated[int, Interval(ge=0, le=MAX)]", "Whole = int"),
            ("Interval(ge=0, lt=1)", "Interval(ge=0, le=1)"),
            ("Interval(ge=1, le=2**16)]  # of a layer", "Interval(ge=0, le=2**16)]"),
            ("Interval(ge=1, le=2**16)]  # of a layer", "Interval(ge=1, le=2**15)]"),
            ("Interval(ge=1, le=2**12)", "Interval(ge=1, le=2**50)"),
            ("Interval(ge=0, le=2**12)", "Interval(ge=1, le=2**12)"),
        ],
    ),
    Mutants(
        "fedfr_jax/config/build.py",
        f"config/test_build.py {WRONG}",
        [
            ('    check_literals("config", settings)\n', ""),
            ("frozenset, types.EllipsisType)", "frozenset)"),
            ('isinstance(value, str) and "\\0" in value', "False"),
            ("if not isinstance(key, str):", "if False:"),
            ("value, tuple | list) and not hasattr", "value, tuple) and not hasattr"),
            ('{"seed": settings["seed"]}, {"seed": Seed}', "{}, {}"),
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
            ('    _check_names(f"{location}.{name}", inside)', "    pass"),
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
        [("Interval(ge=1, le=2**24)", "Interval(ge=1)")],
    ),
    Mutants(
        "fedfr_jax/central/settings.py",
        WRONG,
        [("if not milestones and warm >= total:", "if False:")],
    ),
    Mutants(
        "fedfr_jax/tasks/model.py",
        NETWORK,
        [
            ("if isinstance(dtype, str | type | jnp.dtype):", "if True:"),
            ("(TypeError, ValueError, SyntaxError)", "(TypeError, ValueError)"),
            ("(TypeError, ValueError, SyntaxError)", "(TypeError, SyntaxError)"),
        ],
    ),
    Mutants("fedfr_jax/federated/local.py", RANGES, [(BELOW_ONE, ANY)]),
    Mutants(
        "fedfr_jax/federated/algorithms/server_optimizers.py",
        RANGES,
        [(BELOW_ONE, ANY)],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/mime.py",
        RANGES,
        [
            (
                f"{MIMELITE}{BELOW_ONE}",
                f"{MIMELITE}{ANY}",
            )
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/methods.py",
        ROWS,
        [("return call(section, Method, options)", "return Method(**options)")],
    ),
    Mutants(
        "fedfr_jax/tasks/reid/methods.py",
        REID,
        [
            (
                'check_values(f"{section}.", batches, {"identities_per_batch": Whole})',
                "pass",
            )
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/reid/evaluator.py",
        f"tasks/reid/test_judge.py {REID}",
        [
            ("local_training: Mapping | None = (", 'local_training: "Mapping" = ('),
            ("MinLen(1)]", "MinLen(0)]"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/reid/loss.py",
        REID,
        [("triplet_margin: NonNegative | None", "triplet_margin: float | None")],
    ),
]
