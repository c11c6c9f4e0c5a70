"""The `ray` platform: nodes are agents in Ray actors, one on each machine of a Ray cluster.

midstep decides, Ray places: no actor of an agent is restarted by Ray. Only the controller's actor is (`launch.ray`).
"""
