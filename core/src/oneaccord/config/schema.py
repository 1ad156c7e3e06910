"""The JSON Schema of the whole configuration file, for editors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oneaccord.config.plugins.loading import named
from oneaccord.config.settings import Settings
from oneaccord.contract.config import model_of

if TYPE_CHECKING:
    from oneaccord.config.plugins import PluginManager

__all__ = ["json_schema"]


def json_schema(manager: PluginManager) -> dict[str, Any]:
    """Return the JSON Schema of ``oneaccord.toml``, with a table for each backend of ``manager``.

    A backend that cannot be described, or whose model has no schema, keeps its table, without a description of its keys.
    """
    schema = Settings.model_json_schema()
    definitions: dict[str, Any] = schema.setdefault("$defs", {})
    tables: dict[str, Any] = {}
    for description in manager.describe_all():
        name = description.plugin.name
        if description.spec is None:
            tables[name] = {"type": "object", "description": str(description.error)}
            continue
        # Two plugins may both have a model `Options`: each gets its own room among the definitions.
        try:
            table = model_of(manager.config_kind(description.spec)).model_json_schema(ref_template=f"#/$defs/{name}.{{model}}")
        except Exception as error:  # noqa: BLE001 - a field of a stranger's model may have no schema, and raises as it likes
            tables[name] = {"type": "object", "description": f"There is no schema for its keys: {named(error)}"}
            continue
        definitions.update({f"{name}.{model}": value for model, value in table.pop("$defs", {}).items()})
        tables[name] = {**table, "description": description.spec.summary}
    properties = schema["properties"]
    properties["backends"] |= {"properties": tables, "additionalProperties": False}
    properties["backend"]["enum"] = ["auto", *manager.names()]
    from oneaccord.schedule.steps import Collective

    properties["algorithms"]["propertyNames"] = {"enum": [collective.value for collective in Collective]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "oneaccord.toml"}
