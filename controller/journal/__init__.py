"""The journal of a job: what has happened and what was decided, durable before it is done. In sqlite."""
