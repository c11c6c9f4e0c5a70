"""How a machine comes to a job that runs on several: endpoints, roles, torchrun's flags, admission."""
