"""Examples: where they come from, in which order they go, and how they are varied."""
