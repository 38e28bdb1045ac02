"""One stage from its identity to its published outputs, and who runs its job.

What is published was made from what lies in the workspace.
"""
