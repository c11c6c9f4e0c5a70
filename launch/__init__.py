"""The work of `midstep run`: it makes or joins a job, and keeps its processes running until it has ended."""
