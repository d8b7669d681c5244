"""Parts of the Catalyst runners."""
