"""Scripts under measurement that must not lie beside a module with the name of what they import."""
