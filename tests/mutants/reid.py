"""Faults of re-identification: sources, scenarios, retrieval and its judge."""

from tests.mutants import Mutants

MUTANTS = [
    Mutants(
        "fedfr_jax/evaluation/retrieval.py",
        "evaluation/test_retrieval.py",
        [
            ("return num_same - num_junk, num_same", "return num_same, num_same"),
            ("by_count[num_good[by_count] > 0]", "by_count"),
            ("np.where(is_same, is_junk, 2)", "np.where(is_same, ~is_junk, 2)"),
        ],
    ),
    Mutants(
        "fedfr_jax/evaluation/retrieval.py",
        "evaluation/test_retrieval.py",
        [
            ("jnp.where(is_kept[None, :], scores, -jnp.inf)", "scores"),
            ("(index < other_index)", "(index > other_index)"),
            ("(column >= num_good[:, None]) & ", ""),
            ("np.where(hits == 0, 1.0,", "np.where(hits == 0, 0.0,"),
            ('1.0 if divide_by == "valid" else', '1.0 if divide_by == "all" else'),
            ("number / (last + 1)", "number / (last + 2)"),
        ],
    ),
    Mutants(
        "fedfr_jax/evaluation/retrieval.py",
        "evaluation/test_retrieval.py",
        [
            ("is_other & is_ranked_before(", "is_ranked_before("),
            (
                "_draw_gallery(own_chance, num_good[:, None])",
                "_draw_gallery(own_chance * 0, query_person[:, None])",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/evaluation/rerank.py",
        "evaluation/test_retrieval.py",
        [
            ("* 3 > is_second.sum(axis=-1) * 2", "* 3 >= is_second.sum(axis=-1) * 2"),
            ("neighbors.indices[:, :k2]", "neighbors.indices[:, : k2 + 1]"),
            ("round(k1 / 2) + 1", "round(k1 / 2)"),
            ("round(k1 / 2) + 1", "k1 // 2 + 1"),
            ("1 - overlap / (2 - overlap)", "1 - overlap"),
        ],
    ),
    Mutants(
        "fedfr_jax/data/sources/reid.py",
        "data/test_reid_sources.py",
        [
            (
                "roles=np.where(is_distractor, GALLERY, roles)",
                "roles=np.where(0, 0, roles)",
            ),
            ('kernel="bicubic"', 'kernel="bilinear"'),
            ("candidates[-count:]", "candidates[:count]"),
            (
                "np.where(is_first, QUERY, GALLERY)",
                "np.where(is_first, GALLERY, QUERY)",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/data/partition/reid.py",
        "tasks/reid/test_data.py",
        [
            ("number - first[client]", "number"),
            ("order[: each * num_clients]", "np.arange(each * num_clients)"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/reid/data.py",
        "tasks/reid/test_data.py",
        [
            ("(source.roles == TRAIN) & is_person &", "(source.roles == TRAIN) &"),
            ("is_person & (domain == number)", "is_person"),
            ("number[domain[rows]]", "domain[rows]"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/reid/evaluator.py",
        "tasks/reid/test_judge.py",
        [
            (
                "variables = networks.client_variables(client)",
                "variables = networks.client_variables(0)",
            ),
            (".sum(axis=1)\n", "[:, 0]\n"),
            ("if name not in unseen]", "]"),
            ("first_hit=hits)", "first_hit=found.first_hit)"),
        ],
    ),
]
