"""The words that controller, agent and processor share: types, messages, errors, and how they travel.

The bottom floor. Everything may import it, and it imports nothing of midstep's.
"""
