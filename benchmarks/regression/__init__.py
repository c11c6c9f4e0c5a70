"""What `make bench` finds, in one file of figures, and what has moved beyond its noise since the last kept one."""
