"""JSON schemas of tools: made short for prompts, and read for the types of values that are text."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

_KINDS = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value")


strict_json = json.JSONDecoder(parse_constant=_refuse)


def shortened(schema: Any, root: Any = None, within: tuple[str, ...] = ()) -> Any:
    """Return a JSON schema without titles, which repeat the names of arguments, and with its
    definitions in place of references: SGLang reads the type of a parameter from its own schema
    alone. Definitions that refer to themselves stay.
    """
    root = schema if root is None else root
    if isinstance(schema, list):
        return [shortened(item, root, within) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    if name in (known := root.get("$defs", {})) and name not in within:
        found = shortened(known[name], root, (*within, name))
        return {
            **found,
            **shortened({k: v for k, v in schema.items() if k != "$ref"}, root, within),
        }
    short = {
        key: shortened(value, root, within)
        for key, value in schema.items()
        if not (key == "$defs" or (key == "title" and isinstance(value, str)))
    }
    if schema is root and known and '"#/$defs/' in json.dumps(short):
        short["$defs"] = shortened(known, {}, within)
    return short


def properties(schema: Any) -> dict[str, Any]:
    """Return the schema of each parameter, also where alternatives declare them."""
    if not isinstance(schema, Mapping):
        return {}
    if isinstance(schema.get("properties"), Mapping):
        return dict(schema["properties"])
    found: dict[str, Any] = {}
    for keyword in ("anyOf", "oneOf", "allOf"):
        for branch in schema.get(keyword) or ():
            found = properties(branch) | found
    return found


def typed(text: str, schema: Any) -> Any:
    """Return the value of a text by its schema, as SGLang's parser `qwen3_coder` does. A text that
    is no value of its type stays a text, but for booleans, which SGLang then reads as false.

    Raises ValueError for such a boolean.
    """
    kind = kind_of(schema) or "string"
    try:
        if text.lower() == "null":
            return None
        if kind.startswith("bool"):
            return {"true": True, "false": False}[text.lower()]
        if kind.startswith(("int", "num", "float")):
            return _number(text, is_whole=kind.startswith("int"))
        if kind.startswith(("object", "array", "dict", "list")):
            return strict_json.decode(text)
    except KeyError as error:
        raise ValueError(f"{text[:40]!r} is neither true nor false") from error
    except (ValueError, RecursionError):
        pass  # the check of its type names the problem
    return text


def _number(text: str, *, is_whole: bool) -> Any:
    try:
        return int(text)
    except ValueError:
        return text if is_whole else strict_json.decode(str(float(text)))


def kind_of(schema: Any) -> str | None:
    """Return the type that a schema gives to a text, as SGLang does: of alternatives the text, or
    else the first that is not null. None if it gives none.
    """
    if not isinstance(schema, Mapping):
        return None
    kind, either, values = schema.get("type"), schema.get("anyOf") or schema.get("oneOf"), None
    if isinstance(kind, str):
        return kind.strip().lower()
    if isinstance(kind, list) and kind:
        return next((str(one) for one in kind if one != "null"), "string")
    if isinstance(either, list) and (kinds := [one for s in either if (one := kind_of(s))]):
        others = [one for one in kinds if one != "null"]
        return "string" if "string" in others else (others or kinds)[0]
    if isinstance(values := schema.get("enum"), list):
        found = {_KINDS.get(type(value), "string") for value in values}
        return found.pop() if len(found) == 1 else "string"
    if isinstance(all_of := schema.get("allOf"), list):
        found_in = (one for s in all_of if (one := kind_of(s)) not in (None, "string"))
        return next(found_in, "string")
    return "object" if "properties" in schema else "array" if "items" in schema else None
