"""What is done to a world: a generation is opened, all stop at a boundary, ranks move, the job ends. Pure."""
