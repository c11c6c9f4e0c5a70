"""Status and incidents as text, JSON, a picture or a trace. Pure functions of the recorded facts."""
