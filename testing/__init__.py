"""The package that tests are made of: a simulated cluster, played agents and processes, and the list of invariants."""
