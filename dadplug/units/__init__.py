"""Units of exchange: parameters with the gradients or factors that travel together."""
