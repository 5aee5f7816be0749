"""The process group "commpress"."""

from commpress.integrations.process_group.group_options import GroupOptions

__all__ = ["GroupOptions"]
