"""Metric names: labels for tables and plots, and the better direction."""

import re

# Words in the names (before "@") of metrics that are better when smaller, and of those
# that are neither good nor bad.
SMALLER_IS_BETTER = {"eer", "error", "errors", "frr", "loss", "seconds"}
SMALLER_IS_BETTER |= {"mb", "rounds", "epsilon", "joules", "kwh", "price"}
SMALLER_IS_BETTER |= {"kg", "grams"}
NEITHER = {"delta", "far", "measured", "std", "threshold"}
# Marks numbers of clients of a private method, which the mechanism does not cover.
NOT_PRIVATE = "not_private"
WORDS = {
    "tar": "true accept rate",
    "far": "false accept rate",
    "eer": "equal error rate",
    "tpir": "true identification rate",
    "fpir": "false identification rate",
    "std": "standard deviation",
    "cmc": "cumulative matching characteristic",
    "mAP": "mean average precision",
    "mINP": "mean inverse negative penalty",
    "local": "clients' own models",
    "lpm": "local attention by prototypes' margins",
    "apm": "attention by aggregated prototypes' margins",
    "amm": "mean margin of aggregated prototypes",
    "mIoU": "mean intersection over union",
    "co": "CO",  # of co2
    "kwh": "kWh",
}


def direction(name: str) -> int:
    """Direction of a metric: 1 if larger is better, -1 if smaller is, 0 for neither.

    >>> direction("tar@far=1e-03"), direction("eer"), direction("threshold")
    (1, -1, 0)
    """
    words = set(re.split(r"[^a-z]+", name.lower().partition("@")[0]))
    if words & NEITHER:
        return 0
    return -1 if words & SMALLER_IS_BETTER else 1


def metric_label(name: str) -> str:
    """Label of a metric or evaluator, capitalized, with abbreviations written out.

    >>> metric_label("tar@far=1e-03"), metric_label("mIoU")
    ('True accept rate at false accept rate 0.001', 'Mean intersection over union')
    """
    text = re.sub("[A-Za-z]+", lambda match: WORDS.get(match[0], match[0]), name)
    text = re.sub("=([0-9.e+-]+)", _number, text.replace("@", " at "))
    text = re.sub(r"[_=\s]+", " ", text).strip()
    return text[:1].upper() + text[1:]


def panel_title(evaluator: str, name: str) -> str:
    """Title of a plot: evaluator and metric.

    >>> panel_title("generic", "accuracy"), panel_title("accuracy", "accuracy")
    ('Generic: accuracy', 'Accuracy')
    """
    return metric_label(name if name == evaluator else f"{evaluator}: {name}")


def _number(match: re.Match) -> str:
    """Format a rate: 1e-03 as 0.001, but 1e-06 unchanged."""
    try:
        return f" {float(match[1]):g}"
    except ValueError:
        return match[0]
