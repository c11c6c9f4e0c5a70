"""The `kubernetes` platform: a job's nodes are pods, which it makes, deletes and watches through the API."""
