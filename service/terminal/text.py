"""Text from elsewhere, made fit to be printed: from bundles, servers and files."""


def printable(text: str) -> str:
    """With control characters, escapes and half characters visible, such as \\x1b.

    A terminal obeys them: a label could rename its window, or overwrite what stands above it.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """The same of several lines, which stay lines."""
    return "\n".join(map(printable, text.split("\n")))
