"""Turn frozen records into JSON and back, by their type hints alone.

A record is an object with a `type` naming its class, a tuple is a list.  Reading checks every
value against its hint, so that a damaged or hostile file is refused with the path of the
fault, and nothing in it is ever executed.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

__all__ = ["SerialError", "from_json", "json_schema", "to_json"]

T = TypeVar("T")


class SerialError(ValueError):
    """A JSON value does not have the form of the record it should be."""


def to_json(value: Any) -> Any:
    """Turn a record, or a tuple or scalar in one, into what `json` can write."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    return value


def from_json(cls: type[T], data: Any, path: str = "$") -> T:
    """Read a record of a class.

    Args:
        cls: The frozen dataclass to read.
        data: What `json` read.
        path: Where `data` stands in the file, for errors.

    Raises:
        SerialError: The data does not have the form of the record.
    """
    value = _read(cls, data, path)
    assert isinstance(value, cls)
    return value


def json_schema(cls: type[Any]) -> dict[str, Any]:
    """Describe the JSON of a record, in JSON Schema 2020-12.

    Fields that a later minor version adds are allowed, as `from_json` allows them.

    Args:
        cls: The frozen dataclass that `from_json` would read.
    """
    definitions: dict[str, Any] = {}
    root = _schema_of(cls, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": cls.__name__,
        **root,
        "$defs": dict(sorted(definitions.items())),
    }


def _schema_of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = {}
            definitions[hint.__name__] = _record_schema(hint, definitions)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if origin is tuple:
        return {"type": "array", "items": _schema_of(typing.get_args(hint)[0], definitions)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema_of(each, definitions) for each in typing.get_args(hint)]}
    if origin is typing.Literal:
        return {"enum": list(typing.get_args(hint))}
    return {"type": _JSON_TYPES[hint]}


_JSON_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
}


def _record_schema(cls: type[Any], definitions: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    fields = {
        field.name: _schema_of(hints[field.name], definitions) for field in dataclasses.fields(cls)
    }
    return {
        "type": "object",
        "description": (cls.__doc__ or "").partition("\n")[0],
        "properties": {"type": {"const": cls.__name__}, **fields},
        "required": ["type", *_required(cls)],
    }


def _required(cls: type[Any]) -> list[str]:
    return [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]


def _read(hint: Any, data: Any, path: str) -> Any:
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _read_record(hint, data, path)
    if origin is tuple:
        return _read_tuple(typing.get_args(hint), data, path)
    if origin in (typing.Union, types.UnionType):
        return _read_union(typing.get_args(hint), data, path)
    if origin is typing.Literal:
        if data not in typing.get_args(hint):
            raise SerialError(f"{path} is {data!r}, not one of {typing.get_args(hint)}")
        return data
    if hint is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if hint is type(None) and data is None:
        return None
    if not isinstance(hint, type) or type(data) is not hint:
        raise SerialError(f"{path} is {type(data).__name__}, not {hint}")
    return data


def _read_record(cls: type[Any], data: Any, path: str) -> Any:
    if not isinstance(data, dict) or data.get("type") != cls.__name__:
        raise SerialError(f"{path} is no {cls.__name__}")
    hints = typing.get_type_hints(cls)
    known = {field.name for field in dataclasses.fields(cls)}
    missing = sorted(set(_required(cls)) - set(data))
    if missing:
        raise SerialError(f"{path} lacks {', '.join(missing)}")
    # A field that this version does not know comes from a later minor version.
    values = {
        name: _read(hints[name], data[name], f"{path}.{name}")
        for name in data
        if name != "type" and name in known
    }
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise SerialError(f"{path}: {error}") from error


def _read_tuple(hints: tuple[Any, ...], data: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise SerialError(f"{path} is {type(data).__name__}, not a list")
    item_hint = hints[0]
    return tuple(_read(item_hint, item, f"{path}[{i}]") for i, item in enumerate(data))


def _read_union(hints: tuple[Any, ...], data: Any, path: str) -> Any:
    faults = []
    for hint in hints:
        try:
            return _read(hint, data, path)
        except SerialError as error:
            faults.append(str(error))
    raise SerialError("; ".join(faults))
