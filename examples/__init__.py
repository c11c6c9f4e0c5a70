"""Scripts to start from: the same training plain and resilient, and the model and text that they share."""
