"""`--host user@login:folder`: commands that run in a clone on a cluster, over plain ssh.

What runs there is exactly what lies here, and nothing that somebody changed there is overwritten.
A run there needs no connection: one that is lost costs the view alone. May import `base`.
"""
