"""Plans: the path of every parameter, decided by all sites in the first step."""
