"""Hugging Face's Trainer and Accelerate: ``commpress.hf`` is short for
``commpress.integrations.trainers.hf``."""

from typing import TYPE_CHECKING

from commpress.lazy import short_name

if TYPE_CHECKING:
    from commpress.integrations.trainers.hf import *  # noqa: F403

short_name("hf", "commpress.integrations.trainers.hf")
