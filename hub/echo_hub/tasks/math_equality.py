"""Compare a parsed answer with the parsed reference answer: the value, the order and the form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from echo_hub.tasks.math_forms import Form, form_of, has_form
from echo_hub.tasks.math_reader import ORDER, Exact, Grid, Item, Measured, RealInterval, Relation, Sets, Several
from echo_hub.tasks.math_sets import MOST_ITEMS, is_same_set, real_set
from echo_hub.tasks.math_values import CONSTANTS, constant_ratio, is_same_value, variables
from echo_hub.tasks.quantities import unit_ratio

if TYPE_CHECKING:
    from sympy import Basic


@dataclass(frozen=True, slots=True)
class AnswerComparison:
    """Compares answers to one problem. If a value or the work exceeds the bounds of `math_values`, every method raises
    `TooMuch`."""

    form: Form | None
    question: str
    is_of_value: bool = False
    """If True, only values are compared, and the form of the answer is ignored."""

    def is_same(self, answer: Item, expected: Item) -> bool:
        """Return True if the answer means the same as the reference answer."""
        match expected:
            case Exact():
                return answer == expected or (_is_equation(answer) and self._ends_with(answer, expected))
            case RealInterval() | Sets():
                return self._is_same_set(answer, expected)
            case Several():
                return self._is_same_several(answer, expected)
            case Relation(signs=signs):
                is_condition = all(sign != "=" for sign in signs)
                return (
                    self._is_same_condition(answer, expected)
                    if is_condition
                    else self._is_same_equation(answer, expected)
                )
            case Grid():
                return self._is_same_grid(answer, expected)
            case Measured():
                return self._is_same_measure(answer, expected)
        return self._is_same_expression(answer, expected)

    def _is_same_expression(self, answer: Item, expected: Basic) -> bool:
        match answer:
            case Relation():
                return _is_equation(answer) and self._ends_with(answer, expected)
            case Measured(expression=expression, unit=unit):
                return unit not in ("%", r"\%") and self._is_same_expression(expression, expected)
            case Several() | RealInterval() | Sets() | Grid() | Exact():
                return False
        if not self.is_of_value and not has_form(
            answer, self.form or form_of(expected, self.question), expected=expected
        ):
            return False
        return is_same_value(answer, expected)

    def _ends_with(self, chain: Item, expected: Item) -> bool:
        """Return True if a chain of equations ends with the expected value, and all its sides agree: `x = 5`, `5 = x`,
        `2 + 3 = 5`."""
        assert isinstance(chain, Relation)
        *before, last = chain.sides
        if len(before) == 1 and _name(last) and not _name(before[0]):
            before, last = [last], before[0]
        if not self.is_same(last, expected):
            return False
        return all(_name(side) or self._is_true(side, last) for side in before)

    def _is_true(self, side: Item, last: Item) -> bool:
        return replace(self, is_of_value=True).is_same(side, last)

    def _is_same_measure(self, answer: Item, expected: Measured) -> bool:
        from sympy import Mul, Rational

        match answer:
            case Relation():
                return _is_equation(answer) and self._ends_with(answer, expected)
            case Measured(expression=expression, unit=unit):
                ratio = unit_ratio(unit, expected.unit)
                if ratio is None:
                    return False
                if ratio == 1:
                    return self._is_same_expression(expression, expected.expression)
                factor = Rational(ratio.numerator, ratio.denominator)
                return is_same_value(Mul(expression, factor, evaluate=False), expected.expression)
        return self.form is not Form.UNIT and self._is_same_expression(answer, expected.expression)

    def _is_same_grid(self, answer: Item, expected: Grid) -> bool:
        if isinstance(answer, Relation):
            return _is_equation(answer) and self._ends_with(answer, expected)
        if isinstance(answer, Several) and answer.kind == "tuple" and len(expected.rows[0]) == 1:
            answer = Grid(tuple((item,) for item in answer.items))
        if not isinstance(answer, Grid) or [*map(len, answer.rows)] != [*map(len, expected.rows)]:
            return False
        cells = zip(sum(answer.rows, ()), sum(expected.rows, ()), strict=True)
        return all(self.is_same(mine, theirs) for mine, theirs in cells)

    def _is_same_set(self, answer: Item, expected: Item) -> bool:
        found, wanted = real_set(answer), real_set(expected)
        if wanted is not None:
            return found is not None and is_same_set(found, wanted)
        match answer, expected:
            case RealInterval(), RealInterval():
                ends = ((answer.low, expected.low), (answer.high, expected.high))
                has_same_ends = (answer.has_low, answer.has_high) == (expected.has_low, expected.has_high)
                return has_same_ends and all(
                    mine is theirs or (mine is not None and theirs is not None and self.is_same(mine, theirs))
                    for mine, theirs in ends
                )
            case Sets(), Sets() if answer.by == expected.by and answer.by != "without":
                return self._has_same_items(answer.parts, expected.parts)
        return False

    def _is_same_several(self, answer: Item, expected: Several) -> bool:
        if expected.kind in ("tuple", "row"):
            return self._is_same_tuple(answer, expected)
        if expected.kind == "ratio":
            if not isinstance(answer, Several) or answer.kind != "ratio":
                return False
            return self._has_same_in_order(answer.items, expected.items)
        wanted = _assigned(expected.items)
        if wanted and len(wanted) > 1:
            return self._is_same_assignment(answer, wanted)
        if isinstance(answer, Relation) and len(answer.sides) == 2 and _name(answer.sides[0]):
            answer = answer.sides[1]
        if not isinstance(answer, Several):
            return len(expected.items) == 1 and self.is_same(answer, expected.items[0])
        if answer.kind not in ("list", "set") or (answer.kind == "set" and _has_names(expected.items)):
            return False
        names = {name for item in (*answer.items, *expected.items) if (name := _named(item))}
        if len(names) > 1:
            return False
        return self._has_same_items([*map(_value, answer.items)], [*map(_value, expected.items)])

    def _is_same_assignment(self, answer: Item, wanted: Mapping[str, Item]) -> bool:
        """Return True if the answer gives the wanted values to the variables: `x = 1, y = 2`, or only the values, in
        the variables' order."""
        match answer:
            case Several(kind="list"):
                found = _assigned(answer.items)
                return (
                    found is not None
                    and found.keys() == wanted.keys()
                    and all(self.is_same(found[name], value) for name, value in wanted.items())
                )
            case Several(kind="tuple", items=items):
                return self._has_same_in_order(items, tuple(wanted.values()))
            case Relation(
                sides=(Several(kind="tuple", items=names), Several(kind="tuple", items=values)), signs=("=",)
            ):
                if len(names) != len(values):
                    return False
                pairs = [Relation((name, value), ("=",)) for name, value in zip(names, values, strict=True)]
                return self._is_same_assignment(Several("list", tuple(pairs)), wanted)
        return False

    def _is_same_tuple(self, answer: Item, expected: Several) -> bool:
        match answer:
            case Relation() if _is_equation(answer):
                return self._ends_with(answer, expected)
            case Several(kind="list", items=items) if (found := _assigned(items)) and len(found) > 1:
                return self._has_same_in_order(tuple(found.values()), expected.items)
            case Several(kind=kind, items=items) if kind == expected.kind:
                return self._has_same_in_order(items, expected.items)
            case Grid(rows=rows) if expected.kind == "tuple" and len(rows[0]) == 1:
                return self._has_same_in_order([row[0] for row in rows], expected.items)
            case RealInterval() | Sets() | Relation() if expected.kind == "tuple":
                return self._is_same_set(answer, expected)
        return False

    def _has_same_in_order(self, items: Sequence[Item], expected: Sequence[Item]) -> bool:
        return len(items) == len(expected) and all(map(self.is_same, items, expected))

    def _has_same_items(self, items: Sequence[Item], expected: Sequence[Item]) -> bool:
        """Return True if both lists hold the same items, in any order."""
        if len(items) != len(expected) or len(items) > MOST_ITEMS:
            return False
        left = list(expected)
        for item in items:
            place = next((place for place, one in enumerate(left) if self.is_same(item, one)), None)
            if place is None:
                return False
            del left[place]
        return True

    def _is_same_condition(self, answer: Item, expected: Relation) -> bool:
        if real_set(expected) is not None:
            return self._is_same_set(answer, expected)
        if not isinstance(answer, Relation):
            return False
        turned = Relation(answer.sides[::-1], tuple(ORDER.get(sign, sign) for sign in answer.signs[::-1]))
        return any(one.signs == expected.signs and self._has_same_links(one, expected) for one in (answer, turned))

    def _has_same_links(self, answer: Relation, expected: Relation) -> bool:
        """Return True if two inequalities mean the same. The code compares their differences (left minus right side);
        chains are compared side by side."""
        if r"\in" in expected.signs or len(expected.sides) > 2:
            return self._has_same_in_order(answer.sides, expected.sides)
        mine, theirs = _difference(answer), _difference(expected)
        if mine is None or theirs is None:
            return False
        ratio = constant_ratio(mine, theirs)
        return ratio is not None and (ratio == 1 or (ratio > 0 and len(variables(theirs)) > 1))

    def _is_same_equation(self, answer: Item, expected: Relation) -> bool:
        """Return True if two equations are equal. For `x = 5`, the value 5 also counts. With several variables, a
        multiple is the same equation."""
        if len(expected.sides) != 2:
            if not isinstance(answer, Relation) or answer.signs != expected.signs:
                return False
            return self._has_same_in_order(answer.sides, expected.sides)
        name = _named(expected)
        if not isinstance(answer, Relation):
            return bool(name) and self.is_same(answer, _value(expected))
        if not _is_equation(answer):
            return False
        if name and _named(answer) == name:
            return self.is_same(_value(answer), _value(expected))
        match answer.sides, expected.sides:
            case (Several() as names, values), (Several() as expected_names, expected_values):
                return names == expected_names and self.is_same(values, expected_values)
        mine, theirs = _difference(answer), _difference(expected)
        if mine is None or theirs is None or (name and not variables(_value(expected))):
            return False
        ratio = constant_ratio(mine, theirs)
        if ratio is None or not ratio:
            return False
        return abs(ratio) == 1 or (not name and len(variables(theirs)) > 1)


def _is_equation(item: Item) -> bool:
    return isinstance(item, Relation) and all(sign == "=" for sign in item.signs)


def _name(item: Item) -> str:
    """Return the name of a variable, or of a tuple of variables; "" for any other item."""
    from sympy import Symbol

    if isinstance(item, Several) and item.kind == "tuple" and all(map(_name, item.items)):
        return "(" + ",".join(map(_name, item.items)) + ")"
    return item.name if isinstance(item, Symbol) and item.name not in CONSTANTS else ""


def _named(item: Item) -> str:
    """Return the variable that an equation sets to a value; "" for any other item."""
    if not _is_equation(item) or not isinstance(item, Relation) or len(item.sides) != 2:
        return ""
    left, right = map(_name, item.sides)
    return left or right


def _value(item: Item) -> Item:
    """Return the value that an equation gives to a variable. Any other item is returned unchanged."""
    if not _named(item) or not isinstance(item, Relation):
        return item
    left, right = item.sides
    return right if _name(left) else left


def _has_names(items: Sequence[Item]) -> bool:
    return any(_named(item) for item in items)


def _assigned(items: Sequence[Item]) -> dict[str, Item] | None:
    """Return the values that the items give to variables, in order. Return None unless each item gives a value to a
    different variable."""
    found = {_named(item): _value(item) for item in items}
    return found if len(found) == len(items) and "" not in found else None


def _difference(relation: Relation) -> Basic | None:
    from sympy import Add, Basic, Integer, Mul

    if len(relation.sides) != 2 or not all(isinstance(side, Basic) for side in relation.sides):
        return None
    left, right = relation.sides
    return Add(left, Mul(Integer(-1), right, evaluate=False), evaluate=False)
