"""The tiered tensor store is planned and not in this release."""
