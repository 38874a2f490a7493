"""Frozen dataclasses from JSON or TOML data, by their type hints; each fault is named by its key path.

Hints that are understood: ``int``, ``float``, ``str``, ``bool``, ``X | None``, ``Literal[...]``, ``list[X]``,
``tuple[X, ...]``, ``dict[str, X]`` and dataclasses, nested as deeply as needed.
"""

import dataclasses
import json
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from forerun.errors import ForerunError

T = TypeVar("T")

_SHOWN_CHARACTERS = 60
_NAMES = {int: "an integer", float: "a finite number", str: "a string", bool: "true or false"}


class SchemaError(ValueError):
    """Data that does not fit a dataclass: ``faults`` names every place, one line each.

    A dataclass may raise it from ``__post_init__`` too, with faults that begin with the name of a field;
    ``parse`` puts the path of the dataclass in front.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = list(faults)


def parse(cls: type[T], data: object, where: str = "") -> T:
    """Make an instance of the dataclass ``cls`` from ``data``, whose key path is ``where`` ("" at the top).

    A field with a default may be missing from the data. An integer is accepted for a float, a boolean for
    neither. Raises SchemaError with every fault: a missing or unknown key, a value of another type, or what
    ``__post_init__`` refuses (a ValueError or a ForerunError there becomes a fault).
    """
    faults: list[str] = []
    value = _read(cls, data, where, faults)
    if faults:
        raise SchemaError(faults)
    return cast("T", value)


def unparse(instance: object) -> dict[str, Any]:
    """The data of a dataclass instance as ``parse`` takes it: dictionaries by field, tuples as lists."""
    if not dataclasses.is_dataclass(instance) or isinstance(instance, type):
        raise TypeError(f"{instance!r} is not a dataclass instance")
    return {field.name: _plain(getattr(instance, field.name)) for field in dataclasses.fields(instance)}


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return unparse(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _read(hint: Any, value: object, where: str, faults: list[str]) -> object:
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _read_dataclass(cast("type[object]", hint), value, where, faults)
    if origin in (Union, types.UnionType):
        return _read_optional(arguments, value, where, faults)
    if origin is Literal:
        if any(value == known and type(value) is type(known) for known in arguments):
            return value
        return _fault(faults, where, f"one of {', '.join(map(str, arguments))}", value)
    if origin is dict:
        if not isinstance(value, dict):
            return _fault(faults, where, "a table", value)
        return {key: _read(arguments[1], item, _join(where, key), faults) for key, item in value.items()}
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            return _fault(faults, where, "a list", value)
        return origin(_read(arguments[0], item, f"{where}[{i}]", faults) for i, item in enumerate(value))
    return _read_scalar(hint, value, where, faults)


def _read_scalar(hint: Any, value: object, where: str, faults: list[str]) -> object:
    if hint not in _NAMES:
        raise TypeError(f"{where}: the type hint {hint} is not understood")
    if hint is float and type(value) in (int, float) and math.isfinite(cast("float", value)):
        return float(cast("float", value))
    if hint is not float and type(value) is hint:  # `is`: True is an int to isinstance
        return value
    return _fault(faults, where, _NAMES[hint], value)


def _read_optional(arguments: tuple[Any, ...], value: object, where: str, faults: list[str]) -> object:
    choices = [argument for argument in arguments if argument is not types.NoneType]
    if len(choices) != 1:
        raise TypeError(f"{where}: only unions with None are understood")
    return None if value is None else _read(choices[0], value, where, faults)


def _read_dataclass(cls: type[object], data: object, where: str, faults: list[str]) -> object:
    if not isinstance(data, dict):
        return _fault(faults, where, "a table", data)
    before, hints = len(faults), get_type_hints(cls)
    fields = [field for field in dataclasses.fields(cast("Any", cls)) if field.init]
    known = [field.name for field in fields]
    unknown = [str(key) for key in data if key not in known]
    faults.extend(f"{_join(where, key)}: unknown key (known: {', '.join(known)})" for key in unknown)
    values: dict[str, object] = {}
    for field in fields:
        if field.name in data:
            values[field.name] = _read(hints[field.name], data[field.name], _join(where, field.name), faults)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            faults.append(f"{_join(where, field.name)}: missing")
    return _construct(cls, values, where, faults) if len(faults) == before else None


def _construct(cls: type[object], values: dict[str, object], where: str, faults: list[str]) -> object:
    try:
        return cls(**values)
    except SchemaError as fault:
        faults += [_join(where, line) for line in fault.faults]
    except (ValueError, ForerunError) as error:
        faults.append(f"{where or 'top level'}: {error}")
    return None


def _fault(faults: list[str], where: str, expected: str, found: object) -> object:
    text = json.dumps(found, default=str, ensure_ascii=False)
    if len(text) > _SHOWN_CHARACTERS:
        text = f"{text[:_SHOWN_CHARACTERS]}..."
    faults.append(f"{where or 'top level'}: expected {expected}, found {text}")
    return None


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
