"""Output of commands on stdout and stderr: plain lines, tables, and a job that is followed while it runs."""
