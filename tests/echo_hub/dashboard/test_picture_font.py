from __future__ import annotations

from echo_hub.dashboard.picture_font import font, has_shape


def test_a_larger_font_is_wider() -> None:
    assert font(40).getlength("Echo") > 1.5 * font(20).getlength("Echo")


def test_letters_have_a_shape_and_unknown_characters_have_none() -> None:
    assert has_shape("A") and has_shape(" ") and not has_shape("\uffff")
