"""Configurations as TOML files: of federations, and written from mappings, with changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from privrep.schema.template import to_toml

FEDERATED_TABLE = """
[privacy]
epsilon = 4
delta = 1e-6

[model]
kind = "table"
user = "user"
target = "y"
features = ["x0", "x1", "x2"]
"""
FEDERATED_NETWORK = """
[privacy]
epsilon = 2.0
delta = 1e-5

[model]
kind = "neural"
classes = 3
image = [8, 8, 1]
"""


def write_config(path: Path, settings: Mapping[str, Any]) -> Path:
    """Write settings by section; what is no section comes first."""
    lines: list[str] = []
    for name, section in settings.items():
        if isinstance(section, dict):
            lines += [f"[{name}]", *(f"{key} = {to_toml(value)}" for key, value in section.items())]
        else:
            lines.insert(0, f"{name} = {to_toml(section)}")
    path.write_text("\n".join(lines) + "\n")
    return path


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with some keys changed, or removed where the new value is None."""
    result = {**settings}
    for name, section in changes.items():
        if isinstance(section, dict) and isinstance(result.get(name), dict):
            section = {key: value for key, value in {**result[name], **section}.items() if value is not None}
        result[name] = section
    return {name: section for name, section in result.items() if section is not None}
