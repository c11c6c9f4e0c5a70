"""What `midstep run` does: makes or joins a job, and keeps its processes running until it has ended."""
