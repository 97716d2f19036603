r"""Compare sets of real numbers by the cuts at their ends: `(0,1]` begins right after 0 and ends right after 1.

Intervals, inequalities of one variable, unions, intersections and differences are all converted to such cuts and then
compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import inf
from typing import TYPE_CHECKING, Final

from echo_hub.tasks.math_reader import ORDER, Item, RealInterval, Relation, Sets, Several
from echo_hub.tasks.math_values import CONSTANTS, approximation, is_same_value, variables

if TYPE_CHECKING:
    from sympy import Basic


@dataclass(frozen=True, slots=True, order=True)
class RealCut:
    """A cut between real numbers: the place directly before a number, or directly after it."""

    number: Fraction | float
    is_behind: bool
    end: Basic | None
    """The number as it is written; None at infinity."""

    def is_same(self, other: RealCut) -> bool:
        """Return True if both cuts are at the same place. Equal approximations are not enough: the exact ends must
        agree."""
        if (self.number, self.is_behind) != (other.number, other.is_behind):
            return False
        return self.end is None or other.end is None or is_same_value(self.end, other.end)


MOST_ITEMS: Final = 50
"""Largest number of items in a list that is compared in any order."""
Cuts = tuple[tuple[RealCut, RealCut], ...]
"""The parts of a set, in ascending order, each with its two ends. The parts do not touch each other."""

_LOWEST: Final = RealCut(-inf, False, None)
_HIGHEST: Final = RealCut(inf, False, None)


@dataclass(frozen=True, slots=True)
class RealSet:
    """A set of real numbers. It also has the variable whose values it holds; "" if no variable is named."""

    cuts: Cuts
    variable: str = ""


def is_same_set(one: RealSet, other: RealSet) -> bool:
    """Return True if both sets hold the same numbers, unless they name different variables."""
    if one.variable and other.variable and one.variable != other.variable:
        return False
    if len(one.cuts) != len(other.cuts):
        return False
    pairs = zip(one.cuts, other.cuts, strict=True)
    return all(mine[0].is_same(theirs[0]) and mine[1].is_same(theirs[1]) for mine, theirs in pairs)


def real_set(item: Item) -> RealSet | None:
    """Return the set of real numbers that an item means. Return None for other items, and for sets whose ends contain
    variables."""
    match item:
        case RealInterval(low=low, high=high, has_low=has_low, has_high=has_high):
            return _interval(low, high, has_low=has_low, has_high=has_high)
        case Several(kind="tuple", items=(low, high)) if not _is_item(low) and not _is_item(high):
            return _interval(low, high, has_low=False, has_high=False)
        case Several(kind="set" | "list", items=items) if len(items) <= MOST_ITEMS:
            points = [_interval(one, one, has_low=True, has_high=True) for one in items if not _is_item(one)]
            if len(points) < len(items) or any(point is None for point in points):
                return None
            return RealSet(_union([part for point in points if point is not None for part in point.cuts]))
        case Sets(by=by, parts=parts):
            return _joined(by, [real_set(part) for part in parts])
        case Relation(sides=sides, signs=signs):
            links = zip(sides, signs, sides[1:], strict=False)
            return _joined("and", [_condition(left, sign, right) for left, sign, right in links])
    return None


def _has_variable(item: Item) -> bool:
    return _is_item(item) or bool(variables(item))


def _is_item(item: object) -> bool:
    from sympy import Basic

    return not isinstance(item, Basic)


def _interval(low: Basic | None, high: Basic | None, *, has_low: bool, has_high: bool) -> RealSet | None:
    begin = _LOWEST if low is None else _cut(low, is_behind=not has_low)
    end = _HIGHEST if high is None else _cut(high, is_behind=has_high)
    if begin is None or end is None or _place(begin) >= _place(end):
        return None
    return RealSet(((begin, end),))


def _cut(end: Basic, *, is_behind: bool) -> RealCut | None:
    if variables(end):
        return None
    number = approximation(end)
    return None if number is None else RealCut(number, is_behind, end)


def _place(cut: RealCut) -> tuple[Fraction | float, bool]:
    return cut.number, cut.is_behind


def _joined(by: str, sets: Sequence[RealSet | None]) -> RealSet | None:
    known = [one for one in sets if one is not None]
    names = {one.variable for one in known if one.variable}
    if len(known) < len(sets) or len(names) > 1:
        return None
    cuts = known[0].cuts
    for other in known[1:]:
        if by == "or":
            cuts = _union([*cuts, *other.cuts])
        else:
            cuts = _intersection(cuts, _complement(other.cuts) if by == "without" else other.cuts)
    return RealSet(cuts, names.pop() if names else "")


def _union(parts: Sequence[tuple[RealCut, RealCut]]) -> Cuts:
    found: list[tuple[RealCut, RealCut]] = []
    for begin, end in sorted(parts, key=lambda part: _place(part[0])):
        if found and _place(begin) <= _place(found[-1][1]):
            found[-1] = (found[-1][0], max(found[-1][1], end, key=_place))
        else:
            found.append((begin, end))
    return tuple(found)


def _complement(cuts: Cuts) -> Cuts:
    edges = [_LOWEST, *(edge for part in cuts for edge in part), _HIGHEST]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return tuple((begin, end) for begin, end in pairs if _place(begin) < _place(end))


def _intersection(one: Cuts, other: Cuts) -> Cuts:
    return _complement(_union([*_complement(one), *_complement(other)]))


def _condition(left: Item, sign: str, right: Item) -> RealSet | None:
    """Return the set that satisfies a condition with a single variable on one side, such as `x < 2`. Return None for
    other conditions."""
    from sympy import Symbol

    if sign == r"\in":
        within = real_set(right)
        if not isinstance(left, Symbol) or within is None or within.variable:
            return None
        return RealSet(within.cuts, left.name)
    if isinstance(right, Symbol) and right.name not in CONSTANTS and not _has_variable(left):
        return _condition(right, ORDER.get(sign, sign), left)
    if not isinstance(left, Symbol) or left.name in CONSTANTS or _has_variable(right):
        return None
    match sign:
        case "<" | r"\le":
            found = _interval(None, right, has_low=False, has_high=sign == r"\le")
        case ">" | r"\ge":
            found = _interval(right, None, has_low=sign == r"\ge", has_high=False)
        case r"\ne":
            point = _interval(right, right, has_low=True, has_high=True)
            found = None if point is None else RealSet(_complement(point.cuts))
        case _:
            return None
    return None if found is None else RealSet(found.cuts, left.name)
