"""What each event does, and what follows from how the ranks stand: the transition table, handlers, rules. Pure."""
