"""Other people's trainers, launchers and checkpoints."""
