"""Routes of LocalAI's own API that Corral's clients do not use."""
