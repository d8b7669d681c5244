"""Plans: which parameter takes which path, settled by all sites in the first step."""
