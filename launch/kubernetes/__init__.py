"""`midstep run --platform kubernetes`: a job's objects are made, and the job is followed, from any machine."""
