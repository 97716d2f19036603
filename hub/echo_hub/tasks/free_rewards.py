"""Rewards that reasoning-gym datasets give to answers without any work, measured by `python -m scripts.free_rewards`.

Four kinds of answers are tried: an empty one, the copied prompt, the best line of the prompt, and a random text in the
form of an answer. For each dataset, the table shows only the best-paid kind, with its mean reward. The datasets were
measured with their default options.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

PAID_FOR_NOTHING: Final = MappingProxyType(
    {
        "ab": 0.05,
        "acre": 0.13,
        "advanced_geometry": 0.02,
        "arc_agi": 0.05,
        "basic_arithmetic": 0.01,
        "bf": 0.01,
        "binary_alternation": 0.01,
        "calendar_arithmetic": 0.04,
        "codeio": 0.01,
        "color_cube_rotation": 0.01,
        "complex_arithmetic": 0.01,
        "count_bits": 0.01,
        "countdown": 0.04,
        "course_schedule": 0.05,
        "cryptarithm": 0.01,
        "emoji_mystery": 0.2,
        "figlet_font": 0.07,
        "fraction_simplification": 0.02,
        "futoshiki": 0.03,
        "gcd": 0.01,
        "group_anagrams": 0.01,
        "gsm_symbolic": 0.11,
        "isomorphic_strings": 0.06,
        "knights_knaves": 0.03,
        "largest_island": 0.01,
        "letter_jumble": 0.04,
        "list_functions": 0.12,
        "mahjong_puzzle": 0.03,
        "manipulate_matrix": 0.09,
        "maze": 0.01,
        "mini_sudoku": 0.04,
        "number_sequence": 0.04,
        "palindrome_generation": 0.02,
        "pool_matrix": 0.1,
        "power_function": 0.01,
        "prime_factorization": 0.01,
        "propositional_logic": 0.93,
        "puzzle24": 0.01,
        "quantum_lock": 0.03,
        "ransom_note": 0.03,
        "rearc": 0.05,
        "rectangle_count": 0.36,
        "rotate_matrix": 0.05,
        "rubiks_cube": 0.01,
        "rush_hour": 0.01,
        "sentence_reordering": 0.05,
        "simple_equations": 0.01,
        "sokoban": 0.05,
        "spell_backward": 0.07,
        "string_manipulation": 0.29,
        "sudoku": 0.03,
        "syllogism": 0.15,
        "time_intervals": 0.14,
        "tsumego": 0.05,
        "word_sorting": 0.06,
    }
)
"""Mean reward, by dataset, of the kind of answer that earns most without work. A dataset that is not listed gives less
than 0.01."""
WARNED_FROM: Final = 0.03
_PREFIX: Final = "reasoning-gym:"


def warning_of(task_name: str) -> str | None:
    """Return a warning if a task is known to reward answers without work. Return None for other tasks."""
    paid = PAID_FOR_NOTHING.get(task_name.removeprefix(_PREFIX), 0.0) if task_name.startswith(_PREFIX) else 0.0
    if paid < WARNED_FROM:
        return None
    return (
        f"{task_name} pays {paid:.0%} of the highest reward for an empty, copied or random answer, on average: a model "
        "may learn just that. See what it pays for: echo-hub try-task " + task_name
    )
