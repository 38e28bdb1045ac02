"""What made an artifact, what was made from it, and why two of them differ."""
