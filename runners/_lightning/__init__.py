"""Internal parts of the Lightning strategies."""
