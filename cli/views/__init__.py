"""How status and incidents are shown: text, JSON, a picture, a trace. Pure functions of the recorded facts."""
