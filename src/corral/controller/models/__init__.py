"""The catalogue of models: definitions and schedules, and where they come from. Loading is `loads/`'s."""
