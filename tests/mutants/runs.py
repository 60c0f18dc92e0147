"""Faults of the loop over rounds, of checkpoints and of what guards their files."""

from tests.mutants import Mutants

LOOP = "runs/test_loop.py"

MUTANTS = [
    Mutants(
        "fedfr_jax/runs/loop.py",
        "runs/test_private_marks.py",
        [("**({NOT_PRIVATE: True} if is_private(outcome) else {}),", "")],
    ),
    Mutants(
        "fedfr_jax/runs/data_digest.py",
        "runs/test_data_digest.py",
        [
            ("(is_known & (sums[0] != sums[1]))", "(is_known & (sums[0] > sums[1]))"),
            ("np.flatnonzero(use >= 0)", "np.arange(len(source.labels))"),
            (
                "x.uses, x.clients, x.numbers",
                "x.uses, x.numbers",
            ),
            ("stored.identities[old] != now", "now.identities[new] != now"),
        ],
    ),
    Mutants(
        "fedfr_jax/runs/data_digest.py",
        "cli/test_changed_data.py",
        [
            ("if has_changed and is_kept:", "if has_changed:"),
            ("if path.exists() else True", "if path.exists() else False"),
            ("is_named and changed != ACCEPT", "is_named and False"),
            (
                "fresh = [folder for folder in folders if not",
                "fresh = [folder for folder in folders if",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/runs/stage_config.py",
        "cli/test_changed_data.py",
        [("stages[name], without_places(config)", "stages[name], config")],
    ),
    Mutants(
        "fedfr_jax/scaling/study.py",
        "scaling/test_scaling.py",
        [
            (
                "other_inputs = sorted(points.data, key=lambda name: name != data)",
                "other_inputs = [*points.data][:1]",
            )
        ],
    ),
    Mutants(
        "fedfr_jax/models/flops.py",
        "cli/test_sweep.py::test_faces_have_parameters_by_three_definitions",
        [("return network + 2 * rows", "return network + rows")],
    ),
    Mutants(
        "fedfr_jax/plan/stages.py",
        "plan/test_plan.py::"
        "test_stairs_longer_than_the_unit_do_not_hold_up_the_largest",
        [("is_above = memory > room", "is_above = False")],
    ),
    Mutants(
        "fedfr_jax/plan/stages.py",
        "plan/test_plan.py::test_classes_in_whole_chunks_fill_what_is_free",
        [("min(trainer.settings.class_chunk_size or 1, rows_each)", "1")],
    ),
    Mutants(
        "fedfr_jax/runs/loop.py",
        LOOP,
        [
            (
                "                outputs.store.flush(round + 1)\n",
                "                pass\n",
            ),
            (
                "                outputs.store.flush(round + 1)\n"
                "            cover_logs([*outputs.sinks, outputs.client_log])\n"
                "            outputs.checkpointer.save(round + 1, server, "
                "files=files)\n",
                "                outputs.checkpointer.save(round + 1, server, "
                "files=files)\n"
                "            outputs.store.flush(round + 1)\n",
            ),
            ("must_end = is_end_of_call and ", "must_end = "),
            ("        protected=checkpointer.steps(),\n", ""),
        ],
    ),
    Mutants(
        "fedfr_jax/runs/remote.py",
        "runs/test_bucket.py",
        [
            ("        if self._newest() != claim:\n", "        if False:\n"),
            ("claim <= self._claim:\n", "True:\n"),
            (
                "self._entry(new).sha256 != entry.sha256:\n",
                "False:\n",
            ),
            ("        _remove_links(self.folder)\n", ""),
        ],
    ),
    Mutants(
        "fedfr_jax/runs/bucket_manifest.py",
        "runs/test_bucket.py",
        [
            ("        if not is_plain(path):\n", "        if False:\n"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/row_log.py",
        "federated/test_row_log.py",
        [
            ("            if _round(path) > round:\n", "            if False:\n"),
            ("        if _is_outgrown(files):", "        if False:"),
        ],
    ),
    Mutants(
        "fedfr_jax/runs/central_stage.py",
        "runs/test_central_stage.py",
        [
            ("loop.check_epoch(scalars, state, epoch, checkpointer)", "pass"),
        ],
    ),
    Mutants(
        "fedfr_jax/runs/loop.py",
        "runs/test_central_stage.py",
        [
            ("            check_number(name, value, location)\n", "            pass\n"),
            ("        check_state(state, location)\n", "        pass\n"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/simulation.py",
        LOOP,
        [
            ("    check_metrics(metrics, cohort.ids, cohort.round)\n", ""),
            ("    check_updates(is_finite, cohort.ids, cohort.round)\n", ""),
            ('    check_state(server, f"round {round + 1}")\n', ""),
            ("    check_rows(rows, ids, round)\n", ""),
        ],
    ),
    Mutants(
        "fedfr_jax/runs/sweep.py",
        "cli/test_sweep.py::test_a_number_that_is_not_finite_is_null_in_the_table",
        [("_finite(value) for key", "value for key")],
    ),
    Mutants(
        "fedfr_jax/runs/checkpoint.py",
        LOOP,
        [
            ("KEEP = 2", "KEEP = 1"),
            ('set_aside(self.folder / str(step), ".damaged")', "pass"),
            ("if passing := _transient_error(error):", "if passing := None:"),
            ("leaves.get(trees.path_name(path), x), template", "x, template"),
        ],
    ),
    Mutants(
        "fedfr_jax/files.py",
        "test_files.py",
        [
            ("            os.fsync(file.fileno())", "            pass"),
            ("temporary.unlink(missing_ok=True)", "pass"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/store.py",
        "federated/test_store.py",
        [
            ("np.where(stamps > 0, mixed, np.uint64(0))", "mixed"),
            ("late = part > round", "late = part >= round"),
            ("np.append(change, checksum).sum()", "checksum"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/store.py",
        f"federated/test_store.py {LOOP}",
        [
            ("(*self._protected, round)[-PROTECTED:]", "self._protected"),
            ("(*self._protected, round)[-PROTECTED:]", "(round,)"),
            ("sorted({*protected, resume_round})", "[resume_round]"),
            (
                "        self.settle()\n        self._rows.sync()",
                "        self._rows.sync()",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/runs/experiment.py",
        "runs/test_costs.py",
        [
            ("x >= target", "x > target"),
            ("num_trained(sim.stragglers, sim.cohort_size)", "sim.cohort_size"),
        ],
    ),
]
