"""What tests are made of: a simulated cluster, played agents and processes, and what must always hold."""
