"""A whole job from a seed, in virtual time: the real machine, sessions and mailboxes in a played, hostile world."""
