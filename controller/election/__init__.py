"""Which of a job's controllers leads: elections, and the list of those that stand for one."""
