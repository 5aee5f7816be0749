"""Lightning's Trainer: ``commpress.lightning`` is short for
``commpress.integrations.trainers.lightning``."""

from typing import TYPE_CHECKING

from commpress.lazy import short_name

if TYPE_CHECKING:
    from commpress.integrations.trainers.lightning import *  # noqa: F403

short_name("lightning", "commpress.integrations.trainers.lightning")
