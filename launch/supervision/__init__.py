"""Keep a running job's own processes alive: its controller, its nodes on this machine, its watch over fault sources."""
