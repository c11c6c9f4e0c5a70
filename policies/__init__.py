"""The ladder of ways to recover, and the policy file that shapes it. Deciding is pure; only `files.py` reads a file."""
