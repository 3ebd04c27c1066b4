"""The frozen target with its taps, the draft heads and the formats of their checkpoints."""
