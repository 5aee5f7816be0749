"""Ways in which bytes move between ranks."""
