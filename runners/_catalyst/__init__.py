"""Internal parts of the Catalyst runners."""
