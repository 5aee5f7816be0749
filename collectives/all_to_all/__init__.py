"""All-to-all: its steps, its routes and their executor."""
