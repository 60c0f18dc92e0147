"""Faults of rounds, local training, weights, algorithms and the store."""

from tests.mutants import Mutants

ROUNDS = "federated/test_rounds_golden.py"
MORE_ROUNDS = "federated/test_more_rounds_golden.py"
AGGREGATION = "federated/test_aggregation.py"

MUTANTS = [
    Mutants(
        "fedfr_jax/federated/privacy/mechanism.py",
        "federated/privacy/test_mechanism.py",
        [
            ("jnp.exp(-rate * (share", "jnp.exp(rate * (share"),
            ("x / settings.cohort_size, noisy", "x / total.weight, noisy"),
            ("- (2 * self.count_std) ** -2", "- self.count_std**-2"),
            ("() if settings.clip_quantile is None else is_inside", "is_inside"),
            ("        norm = jnp.where(is_finite, norm, 0)", "        norm = norm"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/communication.py",
        "tasks/test_private_algorithms.py",
        [("    check_covered(algorithm, output)\n", "")],
    ),
    Mutants(
        "fedfr_jax/federated/sweep.py",
        "federated/test_sweep.py::"
        "test_no_member_plays_a_round_that_overspends_its_privacy",
        [("        check_round(sim.accountant, round)\n", "")],
    ),
    Mutants(
        "fedfr_jax/federated/privacy/accountant.py",
        "federated/privacy/test_accountant.py",
        [
            ('noise / 2 if mechanism.neighbors == "replace-one" else noise', "noise"),
            ("(2 if is_fixed or is_cut else 1)", "1"),
            ("mechanism.num_sampled or mechanism.cohort_size", "mechanism.cohort_size"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/privacy/accountant.py",
        "federated/privacy/test_ledger.py",
        [
            ("max(spent, *map(composed, kinds))", "max(map(composed, kinds))"),
            ("np.minimum.reduceat", "np.maximum.reduceat"),
            ("a.compose(b)", "a"),
            ("extend(past, mechanism, rounds))", "extend((), mechanism, rounds))"),
            ("below = 1 - factor + factor", "below = 1 - factor + 0 * factor"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/sampling.py",
        "federated/test_sampling.py",
        [("(places < number)[order]", "(places < cohort)[order]")],
    ),
    Mutants(
        "fedfr_jax/federated/simulation.py",
        "federated/test_engine.py::"
        "test_more_steps_than_a_number_of_32_bits_counts_are_refused",
        [("> MAX:", "> MAX**2:")],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/fedfr.py",
        "federated/test_fedfr_golden.py",
        [
            ("client.num_examples + client.num_added", "client.num_examples"),
            ("WEIGHTS[weighting](client).astype(jnp.float32)", "jnp.float32(1)"),
            (
                "return with_backbone(\n",
                "return (lambda variables, _: variables)(\n",
            ),
            (
                "last = backbone_of(variable_split.merge_personal_variables(end))",
                "last = backbone_of(variable_split.merge_personal_variables(start))",
            ),
            (
                "reference_features(shared, previous,",
                "reference_features(shared, shared,",
            ),
            ('if public_classes_update == "frozen" and', "if False and"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/variable_split.py",
        "federated/test_fedfr_golden.py",
        [
            (
                "personal_variables=personal_variables(end),",
                "personal_variables=personal_variables(start),",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/fedfr.py",
        "tasks/faces/test_methods.py",
        [
            ("        if initial_previous_model:\n", "        if False:\n"),
            ("        if begin:\n", "        if False:\n"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/aggregation/mean.py",
        f"{ROUNDS} {MORE_ROUNDS} tasks/faces/test_configured.py",
        [
            ("wide(x) * weight.astype(wide(x).dtype), update", "wide(x), update"),
            ("return client.num_examples.astype(jnp.float32)", "return jnp.float32(1)"),
            ("trees.divide(total.update, total.weight), state", "total.update, state"),
            ("1 / jnp.where(weights > 0, weights, 1)", "1.0"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/aggregation/contract.py",
        AGGREGATION,
        [
            ("in reversed([*enumerate(links)])", "in [*enumerate(links)]"),
            ('"batch_stats" not in name for', '"stats" not in name for'),
            ("        if link.role == LAST:\n", "        if False:\n"),
            ("    if (has_mean or any(", "    if False and (has_mean or any("),
            ("trees.where(is_finite, sent, sums.zero_sums(sent))", "sent"),
            ("jnp.where(is_finite, 0.0, 1.0)", "jnp.where(is_finite, 0.0, 0.0)"),
            ("result.link_state)", "server.links)"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/aggregation/robust.py",
        AGGREGATION,
        [
            ("mean_between(x, cut, count - cut)", "mean_between(x, cut, count)"),
            ("masked(is_kept, updates, jnp.inf)\n", "updates\n"),
            ("jnp.where(is_kept, weights, 0)", "jnp.abs(weights)"),
            ("distances.dtype) / distances", "distances.dtype) * distances"),
            ("max(2 * num_malicious_clients + 3,", "max(num_malicious_clients + 3,"),
            ("count - num_malicious_clients - 2, 1)", "count, 1)"),
            (
                "push_apart(squared_distances(updates), ~is_kept)\n        nearest",
                "squared_distances(updates)\n        nearest",
            ),
            ("jnp.argsort(krum_scores(", "jnp.argsort(-krum_scores("),
            ("number - num_chosen - num_malicious_clients - 2", "number - 2"),
            ("count - 4 * f, 1)", "count - 2 * f, 1)"),
            ("return total.update, moved, {}", "return total.update, center, {}"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/aggregation/clip.py",
        AGGREGATION,
        [
            (
                "chain(drop_non_finite(), Aggregator(no_state,",
                "chain(Aggregator(no_state,",
            ),
            ("[v + x.astype(v.dtype) for v, x", "[x.astype(v.dtype) for v, x"),
            ("[x - v for x, v in", "[x * v for x, v in"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/aggregation/update_checks.py",
        AGGREGATION,
        [
            ("is_bad |= norm > max_norm", "pass"),
            ("trees.where(is_bad, sums.zero_sums(summary), summary)", "summary"),
            ("1.0 if on_bad_update == STOP else min_kept", "min_kept"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/aggregation/mixing.py",
        "federated/test_robust_golden.py",
        [
            ("rank < number", "rank <= number"),
            ("is_kept, jax.random.uniform(key, (number,)), 2", "is_kept, 1.0, 2.0"),
            ("count - f) // jnp.maximum(count, 1)", "count - f) // (2 * count)"),
            (
                "distances = push_apart(squared_distances(change), ~is_kept)",
                "distances = squared_distances(change)",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/attacks/contract.py",
        "federated/test_attacks.py federated/test_robust_golden.py",
        [
            ("return (place < number)", "return (place <= number)"),
            ("role == HONEST)", "role >= HONEST)"),
            ("is_bad & batch.is_valid & ~batch.is_added", "is_bad & batch.is_valid"),
            ("if expected > bound:", "if expected > bound + 1:"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/aggregation/exact_sum.py",
        "federated/test_exact_sum.py",
        [
            ("jnp.clip(x, -max_code, max_code)", "x"),
            ("INT32_MAX // max_code", "2 * INT32_MAX // max_code"),
            ("scale + uniform.astype(x.dtype)", "scale"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/disclosure.py",
        "federated/test_disclosure.py",
        [
            ("bool(sums.without_kept(summary)[1])", "False"),
            ("all(jnp.issubdtype(", "any(jnp.isscalar("),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/secure_sum.py",
        "federated/test_exact_sum.py",
        [
            ("unmasked += -mask if i in survivors else mask", "unmasked += mask"),
            (
                "codes.astype(np.int32).view(np.uint32) + np.asarray(self_masks)",
                "codes.astype(np.int32).view(np.uint32) + 0 * np.asarray(self_masks)",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/aggregation/compress.py",
        f"{AGGREGATION} federated/test_compress.py",
        [
            ("= error if error_feedback", "= change if error_feedback"),
            ("scale = 1 if error_feedback else flat.size / k", "scale = 1"),
            ("turned(change, rotated_back)", "turned(change, rotated)"),
            ("math.ceil(math.log2(max(size, 2)))", "32"),
            ("jnp.floor(place + chance)", "jnp.floor(place)"),
            ("(2**bits - 1)", "2**bits"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/aggregation/noise.py",
        AGGREGATION,
        [("x + std * jax", "x + std**2 * jax")],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/fedavg.py",
        f"{ROUNDS} federated/test_servers_golden.py",
        [
            ("jax.tree.map(jnp.negative, change", "jax.tree.map(jnp.positive, change"),
            ("change), opt_state)", "change), server.opt_state)"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/scaffold.py",
        f"{ROUNDS} federated/test_algorithm_parts.py",
        [
            ("subtract(server.control, control)", "subtract(control, server.control)"),
            ("gradient - mean_control, 0)", "gradient, 0)"),
            ("result.num_received / num_clients", "1"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/apfl.py",
        ROUNDS,
        [
            ("alpha * v + (1 - alpha) * y", "alpha * y + (1 - alpha) * v"),
            ("jnp.full((), alpha,", "jnp.full((), 1 - alpha,"),
            (
                """v.variables["params"]["alpha"], 0, 1)""",
                """v.variables["params"]["alpha"], 0, 9)""",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/qfedavg.py",
        ROUNDS,
        [
            ("weight = loss**q\n", "weight = loss * 0 + 1\n"),
            ("loss ** (q - 1) * length", "loss**q * length"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/fednova.py",
        f"{ROUNDS} federated/test_servers_golden.py",
        [
            (
                "momentum * (1 - momentum**steps) / rest",
                "momentum * (1 - momentum) / rest",
            ),
            ("effective_steps.astype(d.dtype) * d", "d"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/penalties.py",
        ROUNDS,
        [
            ("0.5 * strength", "strength"),
            ("loss + _with_drift(", "loss - _with_drift("),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/server_optimizers.py",
        "federated/test_servers_golden.py",
        [
            ("square * jnp.sign(v - square)", "square * jnp.sign(square - v)"),
            ("b2 * v + (1 - b2) * square", "v + (1 - b2) * square"),
            ("(jnp.sqrt(v) + eps)", "jnp.sqrt(v + eps)"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/fedrep.py",
        "tasks/classification/test_rows.py",
        [("if head_epochs >= min_epochs:", "if head_epochs > min_epochs:")],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/fedprox.py",
        "contracts/test_ranges.py",
        [("mu: NonNegative", "mu: float")],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/server_optimizers.py",
        "contracts/test_ranges.py",
        [
            (
                "*,\n    b1: BelowOne = 0.9,\n    eps: Positive",
                "*,\n    b1: BelowOne = 0.9,\n    eps: NonNegative",
            )
        ],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/feddyn.py",
        MORE_ROUNDS,
        [
            ("result.num_received / num_clients", "1.0"),
            ('start["params"], drift)\n', 'start["params"], 0)\n'),
            (
                "mean_examples / number",
                "number / mean_examples",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/mime.py",
        MORE_ROUNDS,
        [("with_correction(minus_anchor(local))", "with_correction(local)")],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/mime.py",
        MORE_ROUNDS,
        [("g.astype(m.dtype) + momentum * m", "g.astype(m.dtype)")],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/afl.py",
        MORE_ROUNDS,
        [
            ("domain_learning_rate * mean_loss", "-domain_learning_rate * mean_loss"),
            ("alpha * number", "number"),
            (
                "jnp.concatenate([server.counts[1:], counts[None]])",
                "server.counts",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/afl.py",
        "federated/test_algorithm_parts.py",
        [
            ("server.counts.mean(0)", "server.counts[-1]"),
            ("server.counts[1:], counts[None]", "server.counts[:-1], counts[None]"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/schedule.py",
        "federated/test_schedule.py",
        [("default_rng((seed, round, 2))", "default_rng((seed, 2))")],
    ),
    Mutants(
        "fedfr_jax/federated/systems/stragglers.py",
        "federated/systems/test_stragglers.py",
        [
            (
                "_random(seed, round, 1).random(len(ids))",
                "np.full(len(ids), _random(seed, round, 1).random())",
            ),
            ("_random(seed, round, 0)", "_random(seed, 0, 0)"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/rates.py",
        "test_api.py",
        [
            ("    _check_no_schedule(state)\n", ""),
            ("and not _takes_two(rate)", "and False"),
        ],
    ),
    Mutants(
        "fedfr_jax/api.py",
        "test_api.py",
        [
            ("x.dtype == jnp.uint8", "False"),
            ("if not sim.batching.steps_per_epoch(largest)", "if False"),
            (">= logits.shape[1]", "> logits.shape[1]"),
        ],
    ),
    Mutants(
        "fedfr_jax/api.py",
        "test_api.py",
        [
            ("if not is_fine.all()", "if False"),
            ("smallest < 0 or largest >= limit", "largest >= limit"),
            ("smallest < 0 or largest >= limit", "smallest < 0 or largest > limit"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/afl.py",
        MORE_ROUNDS,
        [
            ("losses * weights[domain_of(batch)]", "losses"),
            ("jnp.where(is_in_domain, losses", "jnp.where(~is_in_domain, losses"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/perfedavg.py",
        MORE_ROUNDS,
        [
            ("value - inner_learning_rate * push", "value - push"),
            ("for sign in (-1, 1)", "for sign in (1, -1)"),
            ("client.batch(size * step + i)", "client.batch(size * step)"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/ditto.py",
        ROUNDS,
        [
            (
                "personalize=lambda server, personal: personal,",
                "personalize=global_part.personalize,",
            )
        ],
    ),
    Mutants(
        "fedfr_jax/federated/local.py",
        "tasks/faces/test_configured.py",
        [
            ("rate * factor ** drops", "rate * drops"),
            ("factor: float = 0.1", "factor: float = 0.5"),
            ("jnp.minimum(round, len(periods) - 1)", "jnp.int32(0)"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/local.py",
        "federated/test_fedfr_golden.py",
        [
            ("progress.step < client.num_steps", "progress.step <= client.num_steps"),
            ("steps = [decay] if weight_decay else []", "steps = []"),
            (
                "jax.random.fold_in(key, step), client.batch(step)",
                "key, client.batch(0)",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/client.py",
        "federated/test_engine.py federated/test_feed.py",
        [
            (
                "is_added = position >= slot.num_examples",
                "is_added = position > slot.num_examples",
            ),
            ("is_valid = position < count", "is_valid = position <= count"),
            ("row = slot.offset + position", "row = position"),
            (
                "extra.added_rows[slot.cohort_index, number]",
                "extra.added_rows[0, number]",
            ),
            (
                "jax.random.fold_in(shuffle_key, lax.div(step, per_epoch))",
                "shuffle_key",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/engine.py",
        "federated/test_engine.py",
        [
            ("trees.where(counts, total, sums.zero_sums(total)), lane", "total, lane"),
            (
                "lax.cond(slot.is_new, fresh, lambda: row)",
                "lax.cond(~slot.is_new, fresh, lambda: row)",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/engine.py",
        "federated/test_participation.py",
        [
            ("        counts &= slot.is_received\n", ""),
            ("        lane = without_absent(lane, counts)\n", ""),
            ("is_finite = jnp.where(result.is_received, is_finite, 1)", "pass"),
            ("trees.where(is_enough, new_server, server)", "new_server"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/systems/asynchronous.py",
        "federated/systems/test_asynchronous.py",
        [
            ("since**-settings.staleness_exponent", "1.0"),
            ("jax.lax.rem(client.round, jnp.int32(number))", "0"),
            ("    start(round + 1)\n", "    start(round)\n"),
            ("d + (a - b), update", "d, update"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/systems/rounds.py",
        "federated/systems/test_rounds.py",
        [
            ("[:cohort_size]\n", "\n"),
            ("is_present & ~is_late", "is_present"),
            ("max(end, systems.deadline) if", "end if"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/systems/edges.py",
        "federated/systems/test_edges.py",
        [
            ("jnp.where(is_own, weight, 0)", "weight * jnp.ones(num_edges)"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/simulation.py",
        "federated/test_participation.py",
        [
            ("steps = np.where(part.is_present, steps, 0)", "pass"),
            ("        part = part.take(order)\n", "        pass\n"),
        ],
    ),
    Mutants(
        "fedfr_jax/data/batching.py",
        "federated/test_feed.py federated/test_engine.py",
        [
            (
                "return -(-num_examples // self.batch_size)",
                "return num_examples // self.batch_size",
            ),
            (
                "partial(jax.random.fold_in, step_key))(number)",
                "lambda n: step_key)(number)",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/schedule.py",
        "federated/test_schedule.py",
        [
            ("np.lexsort((ties, -num_steps))", "np.lexsort((ties, num_steps))"),
            ("(load + steps, place", "(load, place"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/store.py",
        "federated/test_store.py",
        [
            ("(stamps == 0) | (ids < 0)\n        block", "stamps == 0\n        block"),
            ("newest = stamps.argmax(axis=1)", "newest = stamps.argmin(axis=1)"),
            ("age.put(first + needed, np.iinfo(np.int32).max)", "pass"),
            (
                "self._stamps, resume_round, self._written_blocks()",
                "self._stamps, 10**6, self._written_blocks()",
            ),
            ("if not is_whole.all():", "if False:"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/fedaws.py",
        MORE_ROUNDS,
        [
            ("margin=1 - margin", "margin=margin"),
            ("lam * server_learning_rate * gradient", "lam * gradient"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/ifca.py",
        f"{ROUNDS} {MORE_ROUNDS}",
        [
            (".at[group].set(weight)", ".at[0].set(weight)"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/communication.py",
        "federated/test_traffic.py",
        [
            ("{id(x): x.aval for", "{object(): x.aval for"),
            ("for x in leaves if x.ndim]", "for x in leaves]"),
            ("[True] * (len(named) - num_shared)", "[True] * len(named)"),
            ("    size += _bytes([x for _, x in prepared.sent])\n", ""),
            ("up.values()) - _saved_bytes(", "up.values()) - 0 * _saved_bytes("),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/local.py",
        "tasks/classification/test_rows.py::test_frozen_params_stay_under_decay_and_momentum",
        [("return _pack_like(steps, masked), state", "return steps, state")],
    ),
]
