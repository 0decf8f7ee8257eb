"""Real checkpoints, made of files that the package index carries, and the checks with them. No part of the package."""
