"""What a policy can act in, turn after turn: tools and games."""
