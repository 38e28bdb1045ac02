"""What runs inside a job: the worker, its inputs, the meeting of ranks, sessions.

Inputs are hashed before a stage begins; outputs are renamed when they are whole.
"""
