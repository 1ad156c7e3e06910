"""The base of those configs of backends that are pydantic models; whoever imports this module imports pydantic."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

__all__ = ["BackendConfig"]


class BackendConfig(BaseModel):
    """The base of a backend's config model, a pydantic model. Instances are frozen, and unknown keys are errors."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")
    """What pydantic is told."""
