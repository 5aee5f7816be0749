"""Distribution of weights to readers: ``commpress.weights`` is short for
``commpress.integrations.weights``."""

from typing import TYPE_CHECKING

from commpress.lazy import short_name

if TYPE_CHECKING:
    from commpress.integrations.weights import *  # noqa: F403

short_name("weights", "commpress.integrations.weights")
