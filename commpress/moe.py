"""Experts of models: ``commpress.moe`` is short for ``commpress.integrations.experts.moe``."""

from typing import TYPE_CHECKING

from commpress.lazy import short_name

if TYPE_CHECKING:
    from commpress.integrations.experts.moe import *  # noqa: F403

short_name("moe", "commpress.integrations.experts.moe")
