"""Text of names and URLs: Unicode normalization, safe printing, no secrets."""

import re
import unicodedata
from collections.abc import Collection, Mapping
from typing import Any

USER = r"""(://)[^/\s?#'"\\]*@"""  # name and password before a host
SECRET = (
    r"(?i)([?&;][^=&;\s'\"\\]*"
    r"(?:sig|token|secret|passw|pwd|key|credential|auth)[^=&;\s'\"\\]*=)"
    r"[^&;\s'\"\\]+"
)


def without_secrets(text: str) -> str:
    """Mask passwords, tokens and signatures of the URLs in a text.

    >>> without_secrets("s3://me:pass@host/run?v=1&X-Amz-Signature=ab12 is missing")
    's3://***@host/run?v=1&X-Amz-Signature=*** is missing'
    """
    return re.sub(SECRET, r"\1***", re.sub(USER, r"\1***@", text))


def normalize_unicode(text: str) -> str:
    """Normalize text to NFC, since some systems store é as two characters.

    >>> normalize_unicode("e" + chr(0x301)) == chr(0xE9)
    True
    """
    return unicodedata.normalize("NFC", text)


def printable(text: str, keep: str = "") -> str:
    r"""Escape every character that a terminal cannot show.

    Names of files and people are not trusted: one may have a sequence that clears the
    screen or reorders a line.

    Args:
      keep: characters that are not escaped, such as line ends.

    >>> printable("Bo\x1b[2J"), printable("José\n"), printable("a\nb", keep="\n")
    ('Bo\\x1b[2J', 'José\\n', 'a\nb')
    """
    escaped = (
        x if x.isprintable() or x in keep else x.encode("unicode_escape").decode()
        for x in text
    )
    return "".join(escaped)


def flat_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"section.key": value}, the keys of nested sections joined by dots.

    >>> flat_config({"seed": 1, "model": {"name": "mlp"}})
    {'seed': 1, 'model.name': 'mlp'}
    """
    flat = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_config(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def short_keys(keys: Collection[str]) -> dict[str, str]:
    """{dotted key: its shortest end that no other key has}.

    >>> short_keys(["methods.a.rate", "methods.b.rate", "model.depth"])
    {'methods.a.rate': 'a.rate', 'methods.b.rate': 'b.rate', 'model.depth': 'depth'}
    """

    def shorten(key):
        rest = [f".{other}" for other in {*keys} - {key}]
        words = key.split(".")
        ends = (".".join(words[-count:]) for count in range(1, len(words)))
        is_unique = lambda end: not any(other.endswith(f".{end}") for other in rest)
        return next(filter(is_unique, ends), key)

    return {key: shorten(key) for key in keys}


def parse_number(text: str) -> float:
    """Parse a number as files write it, without the underscores of Python's.

    Raises:
      ValueError: for a text that is no number.

    >>> parse_number(" 1e-3")
    0.001
    """
    if "_" in text:
        raise ValueError(f"a number must have no underscore, got {text!r}.")
    return float(text)
