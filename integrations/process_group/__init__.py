"""The process group "commpress"."""
