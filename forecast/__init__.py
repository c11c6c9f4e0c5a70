"""What a policy would do in a month of faults: the real machine over a large job that is played cheaply."""
