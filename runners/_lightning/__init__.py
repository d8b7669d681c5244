"""Parts of the Lightning strategies."""
