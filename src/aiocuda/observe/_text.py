"""Texts of any length with any characters, for exporters."""

from __future__ import annotations

__all__ = ["valid_text"]


def valid_text(text: str, most: int) -> str:
    """Return at most ``most`` characters of a text, and "…" for more, as a text that can be encoded as UTF-8.

    Surrogates without a partner are escaped: a label or the name of a file may have them.
    """
    if len(text) > most:
        text = f"{text[:most]}…"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
