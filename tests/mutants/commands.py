"""Faults in how commands begin, go on and end."""

from tests.mutants import Mutants

STOPPING = "cli/test_stopping.py"
WRONG = "cli/test_mistakes.py::test_a_wrong_setting_is_one_line_and_claims_no_folder"
VALUES = "contracts/test_config_values.py"
MUTANTS = [
    Mutants(
        "configs/fedfr/table_lfw.py",
        VALUES,
        [
            ('"rounds": 3', '"rounds": 2'),
            ('"num_unseen_ids": 120', '"num_unseen_ids": 60'),
            ('"seed": config.get_ref("seed")', '"seed": 0'),
        ],
    ),
    Mutants(
        "configs/base.py", VALUES, [('"widths": (32, 64, 128)', '"widths": (8, 8, 8)')]
    ),
    Mutants(
        "fedfr_jax/config/build.py",
        WRONG,
        [
            ('    _check_augments(experiment, settings["methods"])\n', ""),
            ("    _check_steps(trainer, experiment)\n", ""),
        ],
    ),
    Mutants(
        "fedfr_jax/models/saved_model.py",
        "deploy/test_network.py",
        [("not file.is_file() or digest_json.digest_of_file(file) != ", "None is ")],
    ),
    Mutants(
        "fedfr_jax/runs/experiment.py",
        "deploy/test_network.py",
        [
            ("        forget_model(folder)\n", "        pass\n"),
            ("    add_calibration(folder, evaluations)\n", ""),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/model.py",
        WRONG,
        [
            ("        check_sizes(variables)\n", ""),
            ('    check_dtype(settings.get("dtype"))\n', ""),
        ],
    ),
    Mutants(
        "fedfr_jax/runs/terminal.py",
        "runs/test_terminal.py",
        [('scalars.get("steps") == 0', "False")],
    ),
    Mutants(
        "fedfr_jax/tasks/model.py",
        "tasks/test_network.py",
        [
            (
                '    with naming("config.model", settings):\n        variables',
                "    if True:\n        variables",
            )
        ],
    ),
    Mutants(
        "fedfr_jax/cli/signals.py",
        "cli/test_commands.py::test_the_launcher_starts_without_jax",
        [("import threading\n", "import threading\n\nimport jax  # noqa: F401\n")],
    ),
    Mutants(
        "fedfr_jax/cli/main.py",
        STOPPING,
        [
            ("    distributed.exit_with_parent()", "    pass"),
            ("signals.exit_on_signals(sys.argv[1:])", "pass"),
            ("of_threads = print_no_error_twice()", "pass"),
            ("        for failed in of_threads:", "        for failed in ():"),
            ("sys.unraisablehook = print_of_an_object", "pass"),
            ("    sys.excepthook = lambda *_: None\n", ""),
            ("(errno.ENOSPC, errno.EDQUOT)", "(errno.EDQUOT,)"),
            ("(errno.ENOSPC, errno.EDQUOT)", "(errno.ENOSPC,)"),
        ],
    ),
    Mutants(
        "fedfr_jax/cli/signals.py",
        STOPPING,
        [
            ('name in ("workdir", "restart")', 'name in ("restart",)'),
            ("is_fresh and not equals", "is_fresh and equals"),
            ("    finally:  # also", "    except ZeroDivisionError:  # also"),
            ("key=_modified", "key=lambda p: p.stat().st_mtime"),
            ("if not is_fresh and", "if"),
        ],
    ),
    Mutants(
        "fedfr_jax/cli/launch.py",
        STOPPING,
        [
            ("signal.SIG_BLOCK, TERMINAL", "signal.SIG_BLOCK, ()"),
            ("child.kill()\n    for", "pass\n    for"),
        ],
    ),
    Mutants(
        "fedfr_jax/cli/train.py",
        "cli/test_whole_runs.py::"
        "test_train_keeps_what_a_change_leaves_and_begins_anew_what_is_named",
        [
            ("is_fresh=bool(values.overwrite)", "is_fresh=False"),
            ("restart=values.restart or ()", "restart=()"),
            ("        experiment.stages,\n", "        None,\n"),
        ],
    ),
    Mutants(
        "fedfr_jax/cli/flags.py",
        "cli/test_flags.py",
        [("del section[key]", "pass")],
    ),
    Mutants(
        "fedfr_jax/config/files.py",
        "cli/test_flags.py",
        [
            ("(error, SyntaxError) and error.filename:", "(error, SyntaxError):"),
            ('line {line}," if line else', 'line {line}," if True else'),
            ("isinstance(get_config, types.FunctionType)", "True"),
            ("filter(None, (type(error).__name__,", "tuple((type(error).__name__,"),
        ],
    ),
    Mutants(
        "fedfr_jax/models/weights.py",
        "models/test_weights.py",
        [('if isinstance(path, str | os.PathLike) else ""', "")],
    ),
    Mutants(
        "fedfr_jax/models/weights.py",
        "data/test_sizes.py",
        [
            ("    check_file(path, MEMORY)\n", ""),
        ],
    ),
    Mutants(
        "fedfr_jax/config/build.py",
        "tasks/reid/test_stages.py::"
        "test_what_cannot_be_is_refused_before_anything_is_compiled",
        [("check_stragglers(straggling, min_epochs, cohort_size)", "pass")],
    ),
    Mutants(
        "fedfr_jax/runs/stage_config.py",
        "runs/test_workdir.py",
        [
            (
                '        "clients_per_device",\n',
                '        "clients_per_device",\n        "batch_size",\n',
            ),
            ('"pretrain": ("checkpoint_every",)', '"pretrain": ("flip_probability",)'),
            ('        "stream_buffer_gib",\n', ""),
        ],
    ),
    Mutants(
        "fedfr_jax/runs/experiment.py",
        "runs/test_costs.py",
        [
            (
                "if missing := sorted({*range(1, rounds + 1)} -",
                "if missing := sorted(set() -",
            )
        ],
    ),
    Mutants(
        "fedfr_jax/runs/stage_folders.py",
        "runs/test_workdir.py",
        [
            ("anew = restart | {", "anew = {"),
            ("        if name in changes.restored:", "        if False:"),
            ("        if settings:\n", "        if False:\n"),
            ("if recorded not in (None, digest,", "if recorded in (0, digest,"),
            (
                "recorded[x] not in (None, configured[x])",
                "recorded[x] != configured[x]",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/runs/longer.py",
        "runs/test_workdir.py",
        [
            ("or lengths[0] >= lengths[1]", "or lengths[0] == lengths[1]"),
            ("return lengths[0] if is_alike else None", "return lengths[0]"),
            ("trainer.final_adaptation is not None", "False"),
            ('"" if is_same else', '"" if True else'),
        ],
    ),
    Mutants(
        "fedfr_jax/runs/locks.py",
        "runs/test_locks.py",
        [("fcntl.LOCK_SH", "fcntl.LOCK_EX"), ("fcntl.LOCK_SH", "fcntl.LOCK_UN")],
    ),
    Mutants(
        "fedfr_jax/digest_json.py",
        "runs/test_claims.py",
        [
            ("digest in (None, digest_of(value))", "True"),
            ("sort_keys=True", "indent=1"),
        ],
    ),
    Mutants(
        "fedfr_jax/data/sources/tfds.py",
        "data/test_sources_tfds.py",
        [("[data_dir, *sorted(pathlib.Path(data_dir).iterdir())]", "[data_dir]")],
    ),
]
