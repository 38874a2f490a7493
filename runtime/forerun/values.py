"""Numbers, token ids and texts as they are given (Python's, NumPy's, torch's, ..), brought to plain ones once.

Whatever has `__index__` is an integer and whatever has `__float__` a number, so that no array library is imported.
Truth values are neither, and strings of bytes are neither text nor token ids: both are mistakes more often than not.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from forerun.errors import RequestError

_SHOWN_CHARACTERS = 60
BYTES = (bytes, bytearray, memoryview)


def shown(value: object) -> str:
    """A value as an error message quotes it: on one line, cut where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def is_integer(value: object) -> bool:
    """Whether it is one integer; an array of one dimension or more is not, whatever it holds."""
    return _is_one(value) and hasattr(type(value), "__index__") and not _is_truth_value(value)


def integer(value: object) -> int | None:
    """The plain integer that a value is; None if it is none."""
    if not is_integer(value):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # `is_integer` has seen that it has __index__
    except TypeError:  # an array's scalar of another type
        return None


def number(value: object) -> float | None:
    """The plain number that a value is, an integer kept as one; None if it is none, or too large for a float."""
    if (whole := integer(value)) is not None:
        return whole if abs(whole) <= sys.float_info.max else None
    if not _is_one(value) or not hasattr(type(value), "__float__") or _is_truth_value(value):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def check_number(
    name: str,
    value: object,
    *,
    minimum: float = -math.inf,
    above: float = -math.inf,
    maximum: float = math.inf,
) -> float:
    """The plain number. Raises RequestError, naming it, for one that is not finite or outside its range."""
    parts = [
        f"of at least {minimum}" if minimum > -math.inf else "",
        f"above {above}" if above > -math.inf else "",
        f"up to {maximum}" if maximum < math.inf else "",
    ]
    wanted = " ".join(["a finite number", *filter(None, parts)])
    plain = number(value)
    if plain is None or not math.isfinite(plain):
        raise RequestError(f"{name} is {shown(value)}; give {wanted}")
    if plain < minimum or plain <= above or plain > maximum:
        raise RequestError(f"{name} is {plain}; give {wanted}")
    return plain


def check_integer(name: str, value: object, *, minimum: int, below: int | None = None) -> int:
    """The plain integer. Raises RequestError, naming it, for what is none or outside its range."""
    plain = integer(value)
    if plain is None:
        raise RequestError(f"{name} is {shown(value)}; give a whole number")
    if plain < minimum or (below is not None and plain >= below):
        bounds = f"of at least {minimum}" + (f" and below {below}" if below is not None else "")
        raise RequestError(f"{name} is {plain}; give a whole number {bounds}")
    return plain


def check_flag(name: str, value: object) -> bool:
    """The plain truth value. Raises RequestError, naming it, for anything else."""
    if not _is_truth_value(value):
        raise RequestError(f"{name} is {shown(value)}; give True or False")
    return bool(value)


def check_text(name: str, text: str) -> str:
    """The text. Raises RequestError, telling where, for half of a surrogate pair, which no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} is no valid Unicode text at character {error.start}, counted from 0; pass it as UTF-8"
        ) from error
    return text


def token_id(name: str, value: object) -> int:
    """The plain token id. Raises RequestError, naming where it stands, for what is no integer."""
    plain = integer(value)
    if plain is None:
        raise RequestError(f"{name}: {shown(value)} is no token id; give whole numbers")
    return plain


def token_ids(name: str, values: object) -> tuple[int, ...]:
    """The plain token ids of any sequence. Raises RequestError, naming where they stand, for anything else."""
    return tuple(token_id(name, value) for value in items(name, values, "token ids"))


def items(name: str, values: object, what: str) -> list[Any]:
    """The items of any sequence: a list, a tuple, a range, an array of NumPy, torch or Python, ..

    Raises RequestError, asking for `what`, for strings of bytes and for what is no sequence.
    """
    if isinstance(values, BYTES):
        raise RequestError(
            f"{name}: {shown(values)} is bytes, neither text nor token ids; decode it, or give list(..) of it for ids"
        )
    if not is_sequence(values):
        raise RequestError(f"{name}: {shown(values)} is no list; give {what}")
    return list_of(values)


def is_sequence(value: object) -> bool:
    """Whether it is a row of items, of whatever type; texts and strings of bytes do not count."""
    if isinstance(value, (str, *BYTES, Mapping, AbstractSet)):
        return False
    if isinstance(value, Sequence):
        return True
    dimensions = getattr(value, "ndim", 1)
    return dimensions > 0 and hasattr(type(value), "__len__") and hasattr(type(value), "__getitem__")


def list_of(values: Any) -> list[Any]:
    """The items of a sequence as a list; an array's as plain numbers, or as lists of them where it has more dimensions.

    Only then is every item looked at by itself: one at a time, an array's items would be arrays in turn.
    """
    to_list = getattr(values, "tolist", None)
    return list(to_list() if callable(to_list) else values)


def _is_one(value: object) -> bool:
    dimensions = getattr(value, "ndim", 0)
    return bool(dimensions == 0)


def _is_truth_value(value: object) -> bool:
    return isinstance(value, bool) or (_is_one(value) and "bool" in str(getattr(value, "dtype", "")))
