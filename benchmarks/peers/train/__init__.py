"""The script under measurement lies alone: beside the peers' files `import torchft` would find the wrong one."""
