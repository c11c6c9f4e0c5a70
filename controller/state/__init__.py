"""What the recovery machine knows of a job: its world, the open incident, planned changes, the record. Pure."""
