"""The font of pictures that the hub draws: an installed one, or Pillow's built-in one. Nothing is downloaded."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

_FONTS: Final = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "Arial.ttf", "segoeui.ttf")


@lru_cache(maxsize=64)
def font(size: int) -> FreeTypeFont:
    from PIL import ImageFont

    for name in _FONTS:
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    found = ImageFont.load_default(size)
    assert isinstance(found, ImageFont.FreeTypeFont), "Pillow's wheels have FreeType"
    return found


def has_shape(character: str) -> bool:
    """Return True if the font has a glyph for the character. Return False if it would show its placeholder for missing
    glyphs.
    """
    if character == " ":
        return True
    chosen = font(24)
    return bytes(chosen.getmask(character)) not in (bytes(chosen.getmask("\uffff")), b"")
