"""The journal and the list of controllers of a job in a folder that several machines share."""
