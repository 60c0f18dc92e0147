"""Text of file and identity names: normalized, safe to print."""

import unicodedata


def normalize_unicode(text: str) -> str:
    """The text in one spelling (NFC): some systems keep é as two characters.

    >>> normalize_unicode("e" + chr(0x301)) == chr(0xE9)
    True
    """
    return unicodedata.normalize("NFC", text)


def printable(text: str, keep: str = "") -> str:
    r"""The text with an escape for every character that a terminal would not show.

    Names of files and people come from strangers: one may hold a sequence that clears
    the screen or reorders a line.

    Args:
      keep: characters that stay, such as line ends.

    >>> printable("Bo\x1b[2J"), printable("José\n"), printable("a\nb", keep="\n")
    ('Bo\\x1b[2J', 'José\\n', 'a\nb')
    """
    shown = (
        x if x.isprintable() or x in keep else x.encode("unicode_escape").decode()
        for x in text
    )
    return "".join(shown)
