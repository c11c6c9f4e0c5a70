"""Write what `make bench` finds into one file of figures, and name what moved beyond its noise since the last one."""
