"""Text of file and identity names: Unicode normalization, safe printing."""

import unicodedata


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
