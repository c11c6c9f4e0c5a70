"""A page of a job for a browser: what `midstep status` and `midstep report` say, live. It only looks."""
