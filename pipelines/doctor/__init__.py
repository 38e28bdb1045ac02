"""What of the environment would get in the way, and how to fix it: read, never changed."""
