r"""Remove formatting from an answer ("settings"): `**\(\displaystyle\mathbf{2}√2\)**` becomes `2\sqrt{2}`.

Fonts, sizes, colours, spacing, boxes, Markdown, Unicode's own signs and the many names of one command are formatting.
Marks on letters (`\vec`, `\hat`, primes), brackets and ellipses stay, because they change the meaning. Takes time
linear in the length.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

_SUPERSCRIPTS: Final = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni", strict=True))
_SUBSCRIPTS: Final = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙᵢₖₘ", "0123456789+-()nikm", strict=True))
_RAISED: Final = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_LOWERED: Final = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")
_ROOT: Final = re.compile(r"([√∛∜])\s*(?:(\d+(?:\.\d+)?)|([A-Za-z])|(?=[({\\]))")
_ROOTS: Final = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}

_GREEK_LETTERS: Final = "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩϕϵ"
_GREEK_NAMES: Final = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi "
    "omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega phi epsilon"
)
GREEK: Final = dict(zip(_GREEK_LETTERS, _GREEK_NAMES.split(), strict=True))
"""LaTeX names of Greek letters, by letter."""
_SIGNS: Final = {
    **{
        "−": "-",
        "–": "-",
        "﹣": "-",
        "‐": "-",
        "‑": "-",
        "×": r"\times ",
        "⋅": r"\cdot ",
        "·": r"\cdot ",
        "∙": r"\cdot ",
    },
    **{"•": r"\cdot ", "∗": "*", "÷": r"\div ", "⁄": "/", "∕": "/", "±": r"\pm ", "∓": r"\mp ", "∞": r"\infty "},
    **{
        "≤": r"\le ",
        "⩽": r"\le ",
        "≦": r"\le ",
        "≥": r"\ge ",
        "⩾": r"\ge ",
        "≧": r"\ge ",
        "≠": r"\ne ",
        "≈": r"\approx ",
    },
    **{
        "≡": r"\equiv ",
        "∈": r"\in ",
        "∉": r"\notin ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∖": r"\setminus ",
        "∅": r"\emptyset ",
    },
    **{
        "⊂": r"\subset ",
        "⊆": r"\subseteq ",
        "ℝ": r"\mathbb{R}",
        "ℤ": r"\mathbb{Z}",
        "ℕ": r"\mathbb{N}",
        "ℚ": r"\mathbb{Q}",
    },
    **{
        "ℂ": r"\mathbb{C}",
        "→": r"\to ",
        "⇒": r"\implies ",
        "∧": r"\land ",
        "∨": r"\lor ",
        "¬": r"\lnot ",
        "∑": r"\sum ",
    },
    **{
        "∏": r"\prod ",
        "∫": r"\int ",
        "∂": r"\partial ",
        "…": r"\ldots ",
        "⋯": r"\ldots ",
        "′": "'",
        "’": "'",
        "‘": "'",
    },
    **{"″": "''", "“": '"', "”": '"', "⟨": r"\langle ", "⟩": r"\rangle ", "〈": r"\langle ", "〉": r"\rangle "},
    **{"⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "∠": r"\angle ", "△": r"\triangle "},
    **{"∣": "|", "∥": r"\parallel ", "⊥": r"\perp ", "º": "°", "。": ".", "，": ",", "、": ",", "℃": "°C", "℉": "°F"},
    **{"\u2009": r"\,", "\u202f": r"\,", "\u2061": "", "\u2062": "", "\u200b": "", "\ufeff": "", "\u2060": ""},
    **{letter: f"\\{name} " for letter, name in GREEK.items()},
}
"""LaTeX for Unicode signs. `µ` means micro, not the letter mu, so it is not in the table."""
_UNICODE: Final = str.maketrans(_SIGNS)

_SPACES: Final = frozenset(
    [r"\,", r"\;", r"\:", r"\ ", r"\>", "~", r"\quad", r"\qquad", r"\thinspace", r"\medspace", r"\enspace", r"\space"]
)
_NOTHING: Final = frozenset(
    [
        r"\!",
        r"\left",
        r"\right",
        r"\middle",
        r"\big",
        r"\Big",
        r"\bigg",
        r"\Bigg",
        r"\bigl",
        r"\bigr",
        r"\Bigl",
        r"\Bigr",
        r"\biggl",
        r"\biggr",
        r"\Biggl",
        r"\Biggr",
        r"\bigm",
        r"\Bigm",
        r"\displaystyle",
        r"\textstyle",
        r"\scriptstyle",
        r"\scriptscriptstyle",
        r"\limits",
        r"\nolimits",
        r"\nonumber",
        r"\notag",
        r"\/",
        r"\rm",
        r"\it",
        r"\bf",
        r"\sf",
        r"\tt",
        r"\tiny",
        r"\scriptsize",
        r"\footnotesize",
        r"\small",
        r"\normalsize",
        r"\large",
        r"\Large",
        r"\LARGE",
        r"\huge",
        r"\Huge",
        r"\bfseries",
        r"\itshape",
        r"\rmfamily",
        r"\mathstrut",
        r"\strut",
        r"\mathopen",
        r"\mathclose",
        r"\mathbin",
        r"\mathrel",
        r"\mathord",
        r"\mathop",
        r"\mathpunct",
        r"\protect",
        r"\relax",
        r"\centering",
        r"\ensuremath",
        r"\boldsymbol",
        r"\bm",
        r"\pmb",
        r"\mathbf",
        r"\mathit",
        r"\mathsf",
        r"\mathtt",
        r"\mathnormal",
        r"\underline",
        r"\uline",
        r"\boxed",
        r"\fbox",
        r"\framebox",
        r"\emph",
        r"\textup",
        r"\(",
        r"\)",
        r"\[",
        r"\]",
    ]
)
"""Commands that only format, such as `\\left`. They are removed, with the braces of their argument."""
_BOLD: Final = frozenset([r"\mathbf", r"\bm", r"\boldsymbol", r"\pmb"])
"""Bold fonts. A single bold letter keeps its command, because it may name a vector."""
_TEXT: Final = frozenset(
    [
        r"\text",
        r"\textrm",
        r"\textnormal",
        r"\textit",
        r"\textbf",
        r"\textsf",
        r"\texttt",
        r"\textmd",
        r"\textsl",
        r"\mathrm",
        r"\mbox",
        r"\hbox",
        r"\operatorname",
        r"\operatorname*",
        r"\mathup",
    ]
)
_COLOURED: Final = frozenset([r"\color", r"\textcolor", r"\colorbox", r"\hspace", r"\hspace*"])
"""Commands whose first argument, such as a colour, is not part of the answer."""
_NAMES: Final = {
    **dict.fromkeys([r"\dfrac", r"\tfrac", r"\cfrac", r"\nicefrac", r"\sfrac", r"\flatfrac", r"\xfrac"], r"\frac"),
    **dict.fromkeys([r"\dbinom", r"\tbinom"], r"\binom"),
    **dict.fromkeys([r"\leq", r"\leqslant", r"\leqq"], r"\le"),
    **dict.fromkeys([r"\geq", r"\geqslant", r"\geqq"], r"\ge"),
    **{
        r"\%": "%",
        r"\neq": r"\ne",
        r"\lt": "<",
        r"\gt": ">",
        r"\ast": "*",
        r"\cdotp": r"\cdot",
        r"\lbrace": r"\{",
        r"\rbrace": r"\}",
    },
    **{r"\lbrack": "[", r"\rbrack": "]", r"\lparen": "(", r"\rparen": ")", r"\colon": ":", r"\mid": "|", r"\vert": "|"},
    **{
        r"\lvert": "|",
        r"\rvert": "|",
        r"\varnothing": r"\emptyset",
        r"\degree": "°",
        r"\pounds": "£",
        r"\textsterling": "£",
    },
    **{r"\euro": "€", r"\texteuro": "€", r"\yen": "¥", r"\cent": "¢", r"\textcent": "¢", r"\textdollar": r"\$"},
    **{r"\rightarrow": r"\to", r"\longrightarrow": r"\to", r"\wedge": r"\land", r"\vee": r"\lor", r"\neg": r"\lnot"},
    **dict.fromkeys([r"\dots", r"\cdots", r"\dotsc", r"\dotsb", r"\dotsm", r"\dotso", r"\dotsi", "..."], r"\ldots"),
    **{r"\smallsetminus": r"\setminus", r"\backslash": r"\setminus", r"\Rightarrow": r"\implies", r"\textdegree": "°"},
    **{r"\varphi": r"\phi", r"\varepsilon": r"\epsilon", r"\vartheta": r"\theta", r"\prime": "'", r"\upi": r"\pi"},
    **{
        r"\mathbb": r"\mathbb",
        r"\Bbb": r"\mathbb",
        r"\bar": r"\overline",
        r"\widehat": r"\hat",
        r"\overrightarrow": r"\vec",
    },
    **{
        r"\widetilde": r"\tilde",
        r"\lg": r"\log",
        r"\arctg": r"\arctan",
        r"\tg": r"\tan",
        r"\ctg": r"\cot",
        r"\infin": r"\infty",
    },
}
_PIECE: Final = re.compile(r"\\[A-Za-z]+\*?|\\.|\.{3}|[{}~]|[^\\{}~.]+|.", re.DOTALL)
_AFTER: Final = (
    (re.compile(r"\^\s*(?:\{\s*(?:\\circ|°)\s*\}|\\circ(?![A-Za-z])|°)"), "°"),
    (re.compile(r"\\not\s*="), r"\\ne "),
    (re.compile(r"<=|=<|≤"), r"\\le "),
    (re.compile(r">="), r"\\ge "),
    (re.compile(r"!="), r"\\ne "),
    (re.compile(r"\{\s*,\s*\}"), r"{,}"),
    (re.compile(r"(?<=\.)(\d*)\\dot\s*\{?\s*(\d)\s*\}?$"), r"\1\\overline{\2}"),
)
_MARKDOWN: Final = re.compile(
    r"(?:(?<=[A-Za-z:.,;!?][A-Za-z:.,;!?]\s)|(?<![^\n]))(\*\*|__)(?=\S)([^*_\n]+)(?<=\S)\1(?=$|[\s.,;:!?])"
)
"""Bold Markdown text between words or at the start of a line. `2**3` does not match: it is a power."""
_FENCE: Final = re.compile(r"(`{1,3})([^`]+)\1")
_THOUSANDS: Final = re.compile(r"(?<![\d.])(\d{1,3})((?:(?:\\,|\\!,|\{,\}|,\\!)\d{3})+)(?!\d)")
_NO_BRACKET: Final = re.compile(r"\\(?:left|right)\s*\.")
_LONE_BACKSLASH: Final = re.compile(r"(?<!\\)((?:\\\\)*)\\\s*$")
_APART: Final = re.compile(r"\D")


def without_settings(text: str) -> str:
    """Return the text without formatting, and with one name for each command. Dollar signs stay."""
    text = _FENCE.sub(r"\2", _MARKDOWN.sub(r"\2", text))
    text = _RAISED.sub(lambda found: "^{" + "".join(_SUPERSCRIPTS[sign] for sign in found[0]) + "}", text)
    text = _LOWERED.sub(lambda found: "_{" + "".join(_SUBSCRIPTS[sign] for sign in found[0]) + "}", text)
    text = _ROOT.sub(_root, text).translate(_UNICODE)
    if not text.isascii():
        text = "".join(map(_plain, text))
    text = _NO_BRACKET.sub("", text)
    text = _THOUSANDS.sub(lambda found: found[1] + _APART.sub("", found[2]), text)
    text = _without_commands(text)
    for pattern, meant in _AFTER:
        text = pattern.sub(meant, text)
    return _LONE_BACKSLASH.sub(r"\1", text).strip()


def _root(found: re.Match[str]) -> str:
    inner = found[2] or found[3]
    return _ROOTS[found[1]] + (f"{{{inner}}}" if inner else "")


def _plain(character: str) -> str:
    """Convert ½ to a fraction, and letters and figures of other fonts or of full width to plain ones."""
    form = unicodedata.decomposition(character)
    if form.startswith("<fraction>"):
        above, _, below = unicodedata.normalize("NFKC", character).partition("\u2044")
        return f"\\frac{{{above}}}{{{below}}}"
    if form.startswith(("<font>", "<wide>", "<small>")):
        return unicodedata.normalize("NFKC", character).translate(_UNICODE)
    return " " if character.isspace() else character


def _without_commands(text: str) -> str:
    """Remove formatting commands and the braces of their arguments, in one pass."""
    pieces = _PIECE.findall(text)
    found: list[str] = []
    opened: list[bool] = []
    """One entry for each open brace: True if the brace stays in the text."""
    position, drops_braces = 0, False
    while position < len(pieces):
        piece = pieces[position]
        position += 1
        if piece == "{":
            opened.append(not drops_braces)
            found += [] if drops_braces else ["{"]
        elif piece == "}":
            found += ["}"] if not opened or opened.pop() else []
        elif piece in _BOLD and (letter := _single_letter(pieces, position)):
            found.append(f"\\mathbf{{{letter}}}")
            position += 3
        elif piece in _COLOURED:
            position = _behind_braces(pieces, position)
            drops_braces = True
            continue
        elif piece in _NOTHING:
            drops_braces = True
            found += [" "] if piece[1:].isalpha() else []
            continue
        elif drops_braces and piece.isspace():
            found.append(piece)
            continue
        else:
            found.append(_named(piece))
        drops_braces = False
    return "".join(found)


def _named(piece: str) -> str:
    if piece in _SPACES:
        return " "
    if piece in _TEXT:
        return r"\text"
    name = _NAMES.get(piece, piece)
    return name + " " if name != piece and name[-1].isalpha() else name


def _single_letter(pieces: list[str], position: int) -> str:
    match pieces[position : position + 3]:
        case ["{", letter, "}"] if len(letter.strip()) == 1 and letter.strip().isalpha():
            return letter.strip()
    return ""


def _behind_braces(pieces: list[str], position: int) -> int:
    """Return the position after `{...}` without inner braces; return `position` if no such group begins there."""
    match pieces[position : position + 3]:
        case ["{", _, "}"]:
            return position + 3
    return position
