"""Units of exchange: parameters with the gradients or factors that are sent together."""
