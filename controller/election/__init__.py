"""Elections among a job's controllers, and the list of those that stand for one."""
